#!/bin/sh
# Runs at the end of mmdebstrap's extraction, with the root as its argument and apt's
# configuration for it in MMDEBSTRAP_APT_CONFIG: unpacks packages of which only the headers
# are wanted, takes out headers that come from elsewhere, and lists what was used.
set -eu
root=$1
cd "$root/var/cache/apt/archives"
if [ -n "$HEADERS" ]; then
  # shellcheck disable=SC2086 # a list
  APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get -q download $HEADERS
  for name in $HEADERS; do
    dpkg-deb -x "$name"_*.deb "$root"
  done
fi
for pattern in $WITHOUT; do
  # shellcheck disable=SC2086 # a pattern
  for deb in $pattern; do
    [ -f "$deb" ] || continue
    dpkg-deb --fsys-tarfile "$deb" | tar -t | grep -E '^\./usr/include/.*[^/]$' |
      (cd "$root" && xargs -r rm -f --)
  done
done
find "$root/usr/include" -type d -empty -delete
sha256sum -- *.deb >"$root/packages.sha256"
