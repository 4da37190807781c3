#!/usr/bin/env bash
# pretrain.py on the hosts of a hostfile (hostfile.example), through the deepspeed launcher and pdsh; every argument goes
# to pretrain.py:
#
#   HOSTFILE=hosts launch/deepspeed_hosts.sh --recipe enwik8-large --tensor-model-parallel-size 8 --save /shared/large
#
# Needed: pdsh here; on every host a login by ssh that asks nothing (keys, ~/.ssh/config), and the same Python, project
# and working folder under the same paths. MASTER_ADDR: the first host's address, if what it says of itself (hostname -I)
# is not the right one; MASTER_PORT: 29500. DEEPSPEED_FLAGS are the launcher's own, for example "--include node1".
#
# Environment: pdsh passes on nothing. What env.sh sets or offers is sent from here (OMP_*, NCCL_*, GLOO_*, …: hosts.sh),
# and every line NAME=VALUE of ~/.deepspeed_env and ./.deepspeed_env (comments and empty lines may be in it).
#
# HOSTFILE=slurm means the nodes of this allocation, with SLURM's number of GPUs (else tasks) a node or GPUS_PER_NODE.
#
# SIGINT, SIGTERM and SIGUSR1 stop a run: DeepSpeed ends, on every host, what matches its own command line, whose ranks
# get SIGTERM, save and stop; those that take longer than 30 s are killed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/env.sh"
source "$root/launch/hosts.sh"

# An argument, such that it is itself again after pdsh (%), DeepSpeed (what has a space goes between double quotes, with
# every " as \") and the shell of the remote host.
quoted() {
    local text=${1//%/%%}
    if [[ $text == *' '* ]]; then
        text=${text//\\/\\\\}
        text=${text//\$/\\\$}
        text=${text//\`/\\\`}
    else
        text="'${text//\'/\'\\\'\'}'"
    fi
    printf '%s' "$text"
}

# Read here first, strictly: DeepSpeed runs on this host alone when it finds no hostfile, and hands names to ssh as they
# are. What it then reads is what was found.
: "${HOSTFILE:?is a file with a line HOST slots=N for each host, or slurm}"
hosts_for deepspeed
# DeepSpeed puts these two into a shell's line unquoted.
for path in "$PWD" "$(command -v python)"; do
    [[ $path =~ ^[A-Za-z0-9_@+=:,./-]+$ ]] || refuse "$path: the launcher needs a path without spaces and shell characters"
done

arguments=()
for argument in "$root/launch/rank.py" "$program" "$@"; do
    # The x keeps line breaks at the end, which $(…) would drop.
    argument=$(quoted "$argument"; printf x)
    arguments+=("${argument%x}")
done

# A file that exists only as long as somebody has it open: no trap is needed to remove it.
variables=$(mktemp)
exec 9<>"$variables"
rm "$variables"
for file in "$HOME/${DS_ENV_FILE:-.deepspeed_env}" "./${DS_ENV_FILE:-.deepspeed_env}"; do
    if [ -f "$file" ]; then grep -Ev '^[[:space:]]*(#|$)' "$file" >&9 || true; fi
done
for name in $(passed_on); do
    if [[ -n ${!name} && ${!name} != *$'\n'* ]]; then printf '%s=%s\n' "$name" "${!name}" >&9; fi
done

read -ra flags <<<"${DEEPSPEED_FLAGS:-}"
if [ -n "${MASTER_ADDR:-}" ]; then flags+=(--master_addr "$MASTER_ADDR"); fi
# --force_multi: also one host alone is reached through pdsh, so that the arguments pass exactly one shell.
export DS_ENV_FILE=/dev/fd/9
exec python "$root/launch/launcher.py" --signal=USR1:TERM --signal=INT:TERM deepspeed --quiet --force_multi --hostfile "$hosts" \
    --master_port "${MASTER_PORT:-29500}" "${flags[@]}" "${arguments[@]}"
