"""Send one patch to vLLM: ``python3 -m ci.upstream COMMAND``.

export PATCH   a branch on the pinned commit with the patch's declared dependencies first
               and the patch last, the same as mailbox files for ``git am``, and the text of
               a pull request
ready FILE     say whether that text is filled in

Both refuse while upstream's rules (its AGENTS.md and docs/contributing at the pin) are
unmet, and say all reasons at once.  What only a person can do stays a box to tick: search
for duplicates, run the tests on hardware, understand and defend every line.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import check, envs, gitstack, patches, paths, pin, verify
from ci.errors import StackError, guarded
from ci.patches import Patch, Series
from ci.pin import Pin

FILL_IN = "FILL IN"
_TITLE = re.compile(r"(?:\[[^\[\]]+\])+ \S")
# What only exists in this stack: its name, and what its stand-in for amdsmi reads.
_OURS = re.compile(r"(?i:hipstack)|\bFAKE_[A-Z]+\b")
_SPDX = "# SPDX-License-Identifier: Apache-2.0"
_NOBODY = re.compile(r"@(?:[\w.-]*\.)?(?:example(?:\.\w+)?|invalid|localhost)$|\.invalid$", re.I)


@dataclass(frozen=True)
class Person:
    """Who signs off."""

    name: str
    email: str

    @property
    def sign_off(self) -> str:
        """The trailer of a commit message."""
        return f"Signed-off-by: {self.name} <{self.email}>"


def person(folder: Path) -> Person:
    """Return who the user's git configuration says they are, empty where it does not.

    Args:
        folder: Where git is asked: a repository may have its own answer.
    """

    def ask(key: str) -> str:
        result = subprocess.run(
            ["git", "config", key], cwd=folder, capture_output=True, text=True, check=False
        )
        return result.stdout.strip()

    return Person(ask("user.name"), ask("user.email"))


def message(patch: Patch, who: Person, assisted_by: str = "") -> str:
    """Return a patch's commit message as upstream wants it: the stack's own fields dropped.

    Args:
        patch: The patch.
        who: Who signs off.
        assisted_by: The tool for upstream's ``Assisted-by:`` trailer, or empty.
    """
    trailers = [f"Assisted-by: {assisted_by}"] if assisted_by else []
    trailers.append(who.sign_off)
    return "\n".join([patch.subject, "", purpose(patch), "", *trailers]) + "\n"


def purpose(patch: Patch) -> str:
    """Return the header's ``Why:`` as prose that begins with a capital letter."""
    why = patch.fields.get("Why", "")
    return why[:1].upper() + why[1:]


def commands(patch: Patch) -> list[str]:
    """Return the test plan without what only this stack's stand-in reads."""
    found = []
    for line in patch.test_plan:
        text = re.sub(r"(?:^|(?<=\s))FAKE_[A-Z]+=\S* *", "", line)
        if text not in found:
            found.append(text)
    return found


def reasons_against(patch: Patch, chain: Series, who: Person, again: bool = False) -> list[str]:
    """Say why upstream would not take a patch as it is.

    Args:
        patch: The patch to send.
        chain: It and the patches that it depends on, in order.
        who: Who would sign off.
        again: It may have been sent before.

    Returns:
        One sentence a reason; none when it may be sent.
    """
    found = []
    if not who.name or not who.email:
        found.append(
            "no sign-off: git knows no user.name and user.email of yours, upstream wants a "
            "Signed-off-by (git config --global user.name, user.email)"
        )
    elif _NOBODY.search(who.email):
        found.append(f"no sign-off: {who.email} is nobody's address")
    for one in chain:
        own = one is patch
        found += [f"{one.name}: {text}" for text in _patch_reasons(one, own, again)]
    return found


def _patch_reasons(patch: Patch, own: bool, again: bool) -> list[str]:
    found = [text.split(": ", 1)[1] for text in patch.problems()]
    forwarded = patch.fields.get("Forwarded", "")
    if forwarded.startswith("not-needed"):
        found.append(f"is not for upstream (Forwarded: {' '.join(forwarded.split())})")
    elif forwarded.startswith("http") and own and not again:
        found.append(f"was sent already ({forwarded}); --again makes the branch anew")
    if not _TITLE.match(patch.subject):
        found.append("its subject has no [Tag] and a space before the text")
    tests = [c.path for c in patch.changes if re.search(r"(?:^|/)test_\w+\.py$", c.path)]
    if not tests:
        found.append("brings no tests (no test_*.py among its files)")
    elif not any(path in line for path in tests for line in patch.test_plan):
        found.append(f"its Test-Plan runs none of its own tests ({', '.join(tests)})")
    if _OURS.search(patch.subject + purpose(patch)):
        found.append("its message speaks of this stack")
    for change in patch.changes:
        if _OURS.search(change.path) or any(_OURS.search(line) for line in change.added):
            found.append(f"{change.path} speaks of this stack")
        new_code = change.is_new and change.path.endswith(".py") and change.added
        if new_code and change.added[0] != _SPDX:
            found.append(f"{change.path} does not begin with upstream's SPDX lines")
    found += [text.split(": ", 1)[1] for text in check.whitespace_problems(patch)]
    return found


def pull_request(patch: Patch, chain: Series, template: str, linted: bool) -> str:
    """Write the text of a pull request.

    Args:
        patch: The patch.
        chain: It and its dependencies.
        template: Upstream's template at the pin; its headings are used, and what stands
            below its line is kept.
        linted: Whether upstream's linters were run on the branch.

    Returns:
        Markdown with places that a person must fill in.

    Raises:
        StackError: The template has other headings than this command fills.
    """
    headings = re.findall(r"^## .+$", template, re.M)
    if headings != ["## Purpose", "## Test Plan", "## Test Result"]:
        raise StackError(f"upstream's pull-request template has other headings: {headings}")
    words = re.sub(r"^(?:\[[^\]]+\])+ *", "", patch.subject)
    plan = commands(patch)
    others = [p for p in chain if p is not patch]
    lines = [f"<!-- title: {patch.subject} -->", "", "## Purpose", "", purpose(patch), ""]
    if others:
        lines += ["Stands on these commits, which are part of the branch:", ""]
        lines += [f"- {p.subject}" for p in others] + [""]
    lines += [
        "Not a duplicate, because:", "",
        f"- [ ] I searched the open pull requests and issues: {FILL_IN} what was found",
        "", "```bash",
        f"gh pr list --repo vllm-project/vllm --state open --search {_quoted(words)}",
        f"gh issue list --repo vllm-project/vllm --state open --search {_quoted(words)}",
        "```", "",
        f"- [ ] No open pull request does the same; where one is near: {FILL_IN} the difference",
        "", "## Test Plan", "", "```bash", *plan, "```", "",
    ]  # fmt: skip
    if linted:
        lines += ["Upstream's ruff and mypy pass on every file that the branch touches.", ""]
    lines += [
        "## Test Result", "",
        "| command | without this change | with it | on (GPU, ROCm, torch) |",
        "|---|---|---|---|",
        *(f"| `{text}` | {FILL_IN} | {FILL_IN} | {FILL_IN} |" for text in plan),
        "",
        f"Model evaluation, where output, accuracy or serving change: {FILL_IN} (or why none is "
        "needed)", "",
        "AI assistance was used to write this change.", "",
        "- [ ] I am the human submitter, have reviewed every changed line, have run the tests "
        "above and can defend the change end to end.",
        "- [ ] It is no busywork: somebody suffers what the purpose describes.",
        "- [ ] Documentation is updated where the change needs it.", "",
    ]  # fmt: skip
    _, line, rest = template.partition("\n---\n")
    return "\n".join(lines) + (f"\n---\n{rest.strip()}\n" if line else "")


def _quoted(text: str) -> str:
    return '"' + re.sub(r"[\"`$\\]", "", text) + '"'


def unready(text: str) -> list[str]:
    """Say what a person still has to do in a pull request's text."""
    found = []
    # The boxes of upstream's own template stand below the line and need no ticks.
    for number, line in enumerate(text.partition("\n---\n")[0].splitlines(), 1):
        if FILL_IN in line:
            found.append(f"line {number}: {FILL_IN}: {line.strip()[:80]}")
        elif line.lstrip().startswith("- [ ]"):
            found.append(f"line {number}: not ticked: {line.strip()[6:86]}")
    return found


def _repository(repo: Path, the_pin: Pin) -> None:
    """Make sure that a clone of upstream has the pinned commit.

    Raises:
        StackError: It is no repository or lacks the commit.
    """
    result = subprocess.run(
        ["git", "cat-file", "-e", f"{the_pin.commit}^{{commit}}"],
        cwd=repo, capture_output=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise StackError(
            f"{repo} is no git repository with commit {the_pin.commit[:12]}",
            f"git fetch --depth=1 {the_pin.git} {the_pin.commit}",
        )


def make_branch(
    the_pin: Pin, chain: Series, who: Person, repo: Path, base: str, branch: str,
    out: Path, assisted_by: str = "",
) -> list[Path]:  # fmt: skip
    """Commit patches on a new branch and write them as mailbox files.

    The branch is made in a worktree of its own: what is checked out in the repository
    stays as it is.  Every file is then applied with ``git am`` to the base again, and the
    result must be the branch.

    Args:
        the_pin: The pin.
        chain: The patches, in order.
        who: Author, committer and signer.
        repo: The repository.
        base: The commit to stand on.
        branch: The new branch's name.
        out: Folder for the files; ``NNNN-*.patch`` in it are replaced.
        assisted_by: For the commits' ``Assisted-by:`` trailer, or empty.

    Returns:
        The files, in order.

    Raises:
        StackError: The branch exists, or a patch does not apply without the rest of the
            series (an undeclared dependency).
    """
    exists = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", f"refs/heads/{branch}"],
        cwd=repo, capture_output=True, check=False,
    )  # fmt: skip
    if exists.returncode == 0:
        raise StackError(f"branch {branch} exists in {repo}", "another --branch, or delete it")
    identity = {
        "GIT_AUTHOR_NAME": who.name, "GIT_AUTHOR_EMAIL": who.email,
        "GIT_COMMITTER_NAME": who.name, "GIT_COMMITTER_EMAIL": who.email,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="hipstack-upstream-") as scratch:
        work = Path(scratch) / "work"
        gitstack.git(repo, "worktree", "add", "-q", "-b", branch, str(work), base)
        try:
            for patch in chain:
                try:
                    gitstack.am(work, patch)
                except StackError as error:
                    raise StackError(
                        f"{patch.name} does not apply with only what it depends on: {error}",
                        "python3 -m ci.verify --each names the hidden dependency",
                    ) from None
                gitstack.git(
                    work, "commit", "-q", "--amend", "--reset-author", "--no-verify", "-F", "-",
                    data=message(patch, who, assisted_by).encode(), env=identity,
                )  # fmt: skip
            gitstack.git(
                work, *gitstack.FORMAT_UPSTREAM, "-o", str(out.resolve()), f"{base}..HEAD",
                env=identity,
            )  # fmt: skip
            files = sorted(out.glob("[0-9][0-9][0-9][0-9]-*.patch"))
            wanted = gitstack.git(work, "rev-parse", "HEAD^{tree}").strip()
            gitstack.git(work, "checkout", "-q", "--detach", base)
            for file in files:
                gitstack.git(work, "am", "-q", "--no-3way", str(file.resolve()), env=identity)
            if gitstack.git(work, "rev-parse", "HEAD^{tree}").strip() != wanted:
                raise StackError("the mailbox files do not give the branch's tree")
        except BaseException:
            gitstack.git(repo, "worktree", "remove", "--force", str(work))
            gitstack.git(repo, "branch", "-q", "-D", branch)
            raise
        gitstack.git(repo, "worktree", "remove", "--force", str(work))
    return files


def _lint(the_pin: Pin, chain: Series, origin: str) -> None:
    root = paths.BUILD / "upstream" / "vllm-src"
    verify.make_tree(the_pin, chain, root, origin, exact=False)
    if problems := verify.lint(the_pin, chain, root):
        raise StackError(f"upstream's linters complain: {problems[0]}")


def export(args: argparse.Namespace) -> None:
    """Carry out ``export``."""
    the_pin, series = pin.load(args.pin), patches.load()
    patch, chain = series.get(args.patch), series.closure(args.patch)
    asked = Path(args.repo).resolve() if args.repo else paths.ROOT
    if not asked.is_dir():
        raise StackError(f"--repo {args.repo}: no such folder")
    who = person(asked)
    if reasons := reasons_against(patch, chain, who, args.again):
        for reason in reasons:
            print(f"refused: {reason}", file=sys.stderr)
        raise StackError(f"{patch.name} cannot go upstream yet, {len(reasons)} reason(s) above")
    short = patch.name.split("/")[1]
    folder = paths.BUILD / "upstream" / short
    out = Path(os.environ.get("HIPSTACK_CWD") or os.getcwd(), args.out) if args.out else folder
    base = check.pristine(the_pin, args.source)
    if args.repo:
        _repository(asked, the_pin)
        repo, commit = asked, the_pin.commit
    else:
        repo, commit = paths.BUILD / "upstream" / f"{short}-git", gitstack.BASE
        gitstack.remove_tree(repo)
        repo.parent.mkdir(parents=True, exist_ok=True)
        gitstack.copy_tree(base, repo)
        gitstack.init(repo, the_pin)
    if not args.no_lint:
        _lint(the_pin, chain, args.source)
    template = (base / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    text = pull_request(patch, chain, template, not args.no_lint)
    branch = args.branch or short
    files = make_branch(the_pin, chain, who, repo, commit, branch, out, args.assisted_by)
    (out / "pull-request.md").write_text(text, encoding="utf-8")
    print(f"branch   {branch} in {repo}: {len(files)} commit(s) on vLLM {the_pin.version}")
    for file in files:
        print(f"git am   {file}")
    print(f"text     {out / 'pull-request.md'}: {len(unready(text))} places for you to fill in")
    print("then     read upstream's AGENTS.md, rebase on its main, run the tests on hardware,")
    print(f"         python3 -m ci.upstream ready {out / 'pull-request.md'}, and put the pull")
    print("         request's URL into the patch's Forwarded:")


def _ready(args: argparse.Namespace) -> None:
    path = Path(args.file)
    if not path.is_file():
        raise StackError(f"{path} does not exist")
    if found := unready(path.read_text(encoding="utf-8")):
        for text in found:
            print(text, file=sys.stderr)
        raise StackError(f"{len(found)} place(s) are not filled in")
    print("filled in")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m ci.upstream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table = parser.add_subparsers(dest="command", required=True)
    command = table.add_parser("export", help="branch, mailbox files and pull-request text")
    command.set_defaults(function=export)
    command.add_argument("patch", metavar="PATCH")
    command.add_argument(
        "--repo", metavar="DIR",
        help="your clone of vLLM, which gets the branch on the pinned commit itself; left out: "
        "a repository is made from the pinned source, its one commit standing for the pin",
    )  # fmt: skip
    command.add_argument("--branch", help="the branch's name (default: the patch's)")
    command.add_argument("--out", metavar="DIR", help="for the files (default: build/upstream/)")
    command.add_argument("--again", action="store_true", help="it was sent before: make it anew")
    command.add_argument("--no-lint", action="store_true", help="do not run ruff and mypy")
    command.add_argument(
        "--assisted-by", default="", metavar="TOOL", help="adds upstream's Assisted-by: trailer"
    )
    command.add_argument("--pin", help="which pin (default: the current)")
    command.add_argument("--source", default="sdist", help="of the pin: sdist, git or a path")
    command = table.add_parser("ready", help="is the pull request's text filled in?")
    command.set_defaults(function=_ready)
    command.add_argument("file", metavar="FILE")
    args = parser.parse_args(argv)

    def work() -> int:
        envs.reexec_in_tools("ci.upstream", sys.argv[1:] if argv is None else argv)
        args.function(args)
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
