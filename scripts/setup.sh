# Sourced by the other scripts: `set_up requirements.txt [more.txt ...]` makes .venv in the checkout,
# installs what those files name and this package, and puts .venv first on the PATH.
#
# What is installed is remembered by a hash of the files, so that a second call does nothing and
# needs no network. PYTHON=... chooses the interpreter.

BAMBOO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
BAMBOO_VENV="$BAMBOO_ROOT/.venv"

set_up() {
    local file
    make_venv
    for file in "$@"; do
        install_once "$file" pip install --quiet -r "$BAMBOO_ROOT/$file"
    done
    install_once pyproject.toml \
        pip install --quiet --no-deps --no-build-isolation --editable "$BAMBOO_ROOT"
    export PATH="$BAMBOO_VENV/bin:$PATH"
}

make_venv() {
    [[ -x "$BAMBOO_VENV/bin/python" ]] && return
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null ||
        fail "no $python here; install Python 3.11 or newer, or name it: PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or newer is needed, $("$python" --version) is too old;" \
            "name another: PYTHON=/path/to/python3.11"
    "$python" -m venv "$BAMBOO_VENV" || {
        rm -rf "$BAMBOO_VENV"
        fail "$python cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"
    }
}

# install_once FILE COMMAND...: run the command in the environment unless FILE is as it was then.
install_once() {
    local file="$1" stamp hash
    shift
    stamp="$BAMBOO_VENV/.installed-$file"
    hash="$(sha256sum <"$BAMBOO_ROOT/$file")"
    [[ -f "$stamp" && "$(<"$stamp")" == "$hash" ]] && return
    echo "Installing what $file names into .venv ..." >&2
    "$BAMBOO_VENV/bin/python" -m "$@" || fail "installing from $file failed, see above"
    echo "$hash" >"$stamp"
}

# install_in_ci PROGRAM PACKAGE: what tests need of the machine. Elsewhere they are skipped, with a
# word how to install it.
install_in_ci() {
    [[ -z "${CI:-}" ]] || command -v "$1" >/dev/null && return
    echo "Installing $2 ..." >&2
    apt-get -qq update && apt-get -qq install -y --no-install-recommends "$2" >/dev/null ||
        echo "set-up: $2 could not be installed" >&2
}

fail() {
    echo "set-up: $*" >&2
    exit 1
}
