"""The container image: built, described and checked.  ``python3 -m ci.image --help``."""
