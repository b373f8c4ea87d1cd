#!/usr/bin/env bash
# Finds a Python and hands over to shared/cli/command.py, which needs nothing installed.
# exec, so that Ctrl-C and kill reach the process that knows how to end what it started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

found=""
run_with() { # PYTHON WORD...: become the course's command if this Python is new enough
    local python=$1 version
    shift
    # The interpreter of a broken .venv, or a version manager's empty shim, prints no version.
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 0
    if [ "${version%%.*}" -eq 3 ] && [ "${version#*.}" -ge 11 ]; then
        exec "$python" -m shared.cli.command "$@"
    fi
    found="$found $python is $version,"
}

if [ -n "${PYTHON:-}" ]; then
    run_with "$PYTHON" "$@"
    where="PYTHON=$PYTHON"
elif [[ " $* " == *" --no-setup "* ]]; then
    for name in python python3; do run_with "$name" "$@"; done
    where="the active environment"
else
    for name in .venv/bin/python python3.13 python3.12 python3.11 python3 python; do
        run_with "$name" "$@"
    done
    where="PATH"
fi

cat >&2 <<EOF
run_all.sh: the course needs Python 3.11 or newer; $where has none (found:${found:- nothing}${found:+ too old}).
Install one (python.org, your package manager, or conda with environment.yml) and run this again,
or name one that is elsewhere: PYTHON=/path/to/python3.12 ./run_all.sh
EOF
exit 1
