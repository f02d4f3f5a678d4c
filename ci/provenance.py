"""The provenance statement of a release: in-toto Statement v1, SLSA provenance v1.

``statement`` writes it, from facts alone; ``problems`` reads one back through the in-toto
library, which knows the fields, and compares it with the files of a release.  Command line::

    python -m ci.provenance FILE [FOLDER]     # what is wrong with it, if anything
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Facts:
    """What a statement is made of.

    Attributes:
        subjects: File (or image) name to sha256, in hex.
        build_type: URI of what describes the parameters.
        external: What whoever started the build chose.
        internal: What the builder decided: versions of tools.
        source: URI of the repository, and its commit.
        commit: The commit.
        dependencies: (URI, algorithm, digest) of everything else that went in.
        builder: URI of who built.
        invocation: URI or name of this build.
        started: When it began, RFC 3339 in UTC.
        finished: When it ended.
    """

    subjects: Mapping[str, str]
    build_type: str
    external: Mapping[str, Any]
    internal: Mapping[str, Any]
    source: str
    commit: str
    dependencies: Sequence[tuple[str, str, str]]
    builder: str
    invocation: str
    started: str
    finished: str


def statement(facts: Facts) -> dict[str, Any]:
    """Return the statement.

    Raises:
        ValueError: There is no subject, or a digest is none.
    """
    if not facts.subjects:
        raise ValueError("a statement needs a subject")
    for name, digest in facts.subjects.items():
        if not _SHA256.fullmatch(digest):
            raise ValueError(f"{name}: {digest!r} is no sha256")
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digest}}
            for name, digest in sorted(facts.subjects.items())
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": facts.build_type,
                "externalParameters": dict(facts.external),
                "internalParameters": dict(facts.internal),
                "resolvedDependencies": [
                    {"uri": facts.source, "digest": {"gitCommit": facts.commit}},
                    *(
                        {"uri": uri, "digest": {algorithm: digest}}
                        for uri, algorithm, digest in facts.dependencies
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": facts.builder},
                "metadata": {
                    "invocationId": facts.invocation,
                    "startedOn": facts.started,
                    "finishedOn": facts.finished,
                },
            },
        },
    }


def problems(text: str, files: Mapping[str, str] | None = None) -> list[str]:
    """Say what is wrong with a statement.

    Args:
        text: The statement as JSON.
        files: Name to sha256 of the files that it must be about; None leaves that out.

    Returns:
        Sentences; empty for a good statement.
    """
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    try:
        data = json.loads(text)
        message = json_format.Parse(text, statement_pb2.Statement())
        Statement.copy_from_pb(message).validate()
        json_format.ParseDict(data["predicate"], provenance_pb2.Provenance())
    except (json_format.Error, ValueError, KeyError, TypeError) as error:
        return [f"no valid in-toto statement: {' '.join(str(error).split())}"]
    found = []
    if data["predicateType"] != PREDICATE_TYPE:
        found.append(f"predicate type is {data['predicateType']}, not {PREDICATE_TYPE}")
    definition, details = data["predicate"]["buildDefinition"], data["predicate"]["runDetails"]
    for what, value in (("buildType", definition.get("buildType")),
                        ("builder.id", details.get("builder", {}).get("id"))):  # fmt: skip
        if not re.match(r"[a-z][a-z0-9+.-]*:\S+$", str(value or "")):
            found.append(f"{what} {value!r} is no URI")
    if not definition.get("externalParameters"):
        found.append("there are no externalParameters")
    if files is not None:
        said = {s["name"]: s["digest"].get("sha256") for s in data["subject"]}
        found += [f"{name} is not as stated" for name in sorted(files)
                  if said.get(name, files[name]) != files[name]]  # fmt: skip
        found += [f"{name} is no subject" for name in sorted(set(files) - set(said))]
        found += [f"{name} is stated but absent" for name in sorted(set(said) - set(files))
                  if "/" not in name]  # fmt: skip
    return found


def main(arguments: Sequence[str]) -> int:
    """Check a statement, alone or against a release's folder; return the exit code."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(arguments[0])
    try:
        files = {
            p.name: hashlib.sha256(p.read_bytes()).hexdigest()
            for p in (Path(arguments[1]).iterdir() if len(arguments) == 2 else ())
            if p.is_file() and p.name[0] != "." and p.name not in ("SHA256SUMS", file.name)
        }
        found = problems(file.read_text(encoding="utf-8"), files if len(arguments) == 2 else None)
    except OSError as error:
        found = [f"{arguments[0]}: {error.strerror}"]
    for problem in found:
        print(f"error: {problem}")
    if not found:
        print(f"{arguments[0]}: a valid statement")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
