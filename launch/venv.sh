# Sourced by the other scripts:
#
#     source launch/venv.sh
#     use_venv test,logging        # makes .venv at the repository root as needed; $venv_python runs in it
#
# Python comes from $PYTHON, or else is the first 3.11 or 3.12 found. Where pip gets its packages from is left to pip's
# own variables and files. Installs only when setup.cfg, constraints.txt or the wanted extras have changed.

venv_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv_folder="$venv_root/.venv"
venv_python="$venv_folder/bin/python"
# Whatever is on this path would hide what the environment holds, another checkout of this project for one.
unset PYTHONPATH

venv_suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

# A name on PATH is not enough: version managers put names there that only print an error.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if venv_suits "$candidate"; then
            echo "$candidate"
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then
            echo "PYTHON=$PYTHON is not Python 3.11 or 3.12" >&2
            return 1
        fi
    done
    echo "found no Python 3.11 or 3.12 (tried python3.11, python3.12, python3); name one with PYTHON=/path/to/python" >&2
    return 1
}

use_venv() {
    local extras="$1" extra python wanted stamp missing=""
    if ! { venv_suits "$venv_python" && "$venv_python" -m pip --version >/dev/null 2>&1; }; then
        python="$(find_python)" || return 1
        echo "making $venv_folder with $("$python" --version)"
        # --clear: what is there is half made, or belongs to a Python that is gone.
        "$python" -m venv --clear "$venv_folder" || return 1
    fi
    # The folder is part of it because the install points to the checkout, which may have been moved.
    wanted="$(cat <(echo "$venv_root") "$venv_root"/{setup.cfg,pyproject.toml,constraints.txt} | cksum)" || return 1
    for extra in ${extras//,/ }; do
        stamp="$venv_folder/installed-$extra"
        [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] || missing+="${missing:+,}$extra"
    done
    [ -n "$missing" ] || return 0
    echo "installing into $venv_folder: this project with [$missing], PyTorch included (a few minutes the first time)"
    "$venv_python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$venv_root/constraints.txt" --editable "$venv_root[$missing]" || return 1
    for extra in ${missing//,/ }; do
        echo "$wanted" >"$venv_folder/installed-$extra"
    done
}
