"""The tools of the patch stack: what ``build.sh`` and CI call."""
