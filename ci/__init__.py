"""What build.sh and CI call: typed, without import-time side effects."""
