"""Say whether the server of this container answers: exit code 0, or 1 with the reason.

Runs inside the image, with nothing but Python's standard library.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "HIPSTACK_HEALTH_URL"
_ANY = {"", "0.0.0.0", "::", "[::]"}
_VALUED = ("--host", "--port", "--ssl-certfile")


def address(arguments: Sequence[str]) -> str:
    """Return the address to ask, from the arguments of ``vllm serve``.

    Args:
        arguments: The command line of the container's first process; words before
            ``serve`` (an init program, the interpreter) do no harm.

    Returns:
        The URL of the server's ``/health``.
    """
    found: dict[str, str] = {}
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in _VALUED:
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            found[name] = value if equals else following
    host = found.get("--host", "")
    host = "127.0.0.1" if host in _ANY else host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    scheme = "https" if "--ssl-certfile" in found else "http"
    return f"{scheme}://{host}:{found.get('--port') or '8000'}/health"


def answers(url: str, timeout: float = 5.0) -> str:
    """Ask once.

    Args:
        url: The address.
        timeout: Seconds.

    Returns:
        "" for an answer with status 200, else what is wrong.
    """
    # The certificate names the outside host, and this never leaves the container.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=timeout) as response:
            status: int = response.status
            return "" if status == 200 else f"{url}: status {status}"
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{url}: {reason}"


def main() -> int:
    """Run the check; return the exit code."""
    url = os.environ.get(VARIABLE)
    if not url:
        words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
        url = address(words)
    problem = answers(url)
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
