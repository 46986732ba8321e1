#!/bin/sh
# Prints the path of a CPython that can make the environment: 3.12 or newer, with venv and ensurepip.
# Looks on PATH, then in pyenv's versions. Candidates are run, not trusted by name: a pyenv shim may stand for nothing.
# PYTHON=... names the one to use instead.

probe='
import sys, sysconfig
if sys.version_info < (3, 12) or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(2)
print(sys.executable)
'

if [ -n "$PYTHON" ]; then
    set -- "$PYTHON"
else
    set -- python3.12 python3.13 python3.14 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3
fi

bare=
for candidate; do
    if found=$("$candidate" -c "$probe" 2>/dev/null); then
        echo "$found"
        exit 0
    elif [ $? -eq 2 ]; then
        bare=$candidate
    fi
done

if [ -n "$bare" ]; then
    echo "$bare has no venv and ensurepip: install them (Debian, Ubuntu: apt install python3-venv) or name another Python with PYTHON=/path/to/python3" >&2
elif [ -n "$PYTHON" ]; then
    echo "PYTHON=$PYTHON is no CPython 3.12 or newer (with the GIL)" >&2
else
    echo "no Python 3.12 or newer was found on PATH or in pyenv: install one, or name it with PYTHON=/path/to/python3" >&2
fi
exit 1
