#!/bin/sh
# Install one of Noria's services, and nothing else, into an empty folder:
#
#   images/install.sh ROLE PREFIX
#
# ROLE is router, tokenizer, worker-cpu or worker-cuda. The images are built with this script;
# it works as well on a computer without containers. Afterwards PREFIX/bin/noria-service starts
# the service, from a folder that nobody needs to write to.
#
# Environment:
#   PYTHON       the interpreter (3.11 to 3.13); default: python3
#   TORCH_INDEX  address of PyTorch's wheels for the CPU or for a CUDA version; default: pip's index
#   FLASH_ATTN   worker-cuda: a flash-attn wheel, as a file or an address; default: none, and
#                attention runs on the Triton kernels
set -eu

usage() {
    sed -n '2,15s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

[ $# -eq 2 ] || usage
role=$1
prefix=$2
source=$(cd "$(dirname "$0")/.." && pwd)

case $role in
    router) extras=router,otel module=router ;;
    tokenizer) extras=tokenizer module=tokenizer_svc ;;
    worker-cpu) extras=worker module=worker ;;
    worker-cuda) extras=worker,gpu module=worker ;;
    *) usage ;;
esac
if [ -e "$prefix" ] && [ -n "$(ls -A "$prefix")" ]; then
    echo "install.sh: $prefix is not empty" >&2
    exit 1
fi

"${PYTHON:-python3}" -m venv --without-pip "$prefix"
pip() {
    "${PYTHON:-python3}" -m pip --python "$prefix/bin/python" --disable-pip-version-check "$@"
}
# The constraints pin every package that is not named here, torch among them.
install() {
    pip install --no-compile --quiet --constraint "$source/constraints.txt" "$@"
}
case $role in
    worker-*)
        torch=$(grep '^torch==' "$source/constraints.txt")
        install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
        ;;
esac
# Built from a copy: what setuptools leaves behind would be part of the next build.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
for part in noria router tokenizer_svc worker bench pyproject.toml README.md; do
    cp -R "$source/$part" "$copy"
done
install "$copy[$extras]"
[ -z "${FLASH_ATTN:-}" ] || pip install --no-compile --quiet --no-deps "$FLASH_ATTN"
[ "$role" != worker-cpu ] || "$prefix/bin/python" -m worker.native.prebuild
"$prefix/bin/python" -m compileall -q -j 0 "$prefix/lib"

cat > "$prefix/bin/noria-service" <<EOF
#!/bin/sh
exec "\${0%/*}/python" -P -m $module "\$@"
EOF
chmod 755 "$prefix/bin/noria-service"
du -sh "$prefix"
