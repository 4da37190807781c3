# For the scripts beside this file, which source it: what is run, and HOSTFILE, read strictly, as a file for a launcher.

# PROGRAM: another program than pretrain.py, from the project's root (tools/preflight.py) or by its whole path.
program=${PROGRAM:-pretrain.py}
[[ $program == /* ]] || program=$root/$program

# hosts_for FORM: $hosts is the path of HOSTFILE's hosts as the launcher wants them (hostfile.py); exits with 2 where it
# is no hostfile. The file has no name, and exists only as long as somebody has it open.
hosts_for() {
    local text
    text=$(python "$root/launch/hostfile.py" "$1" "$HOSTFILE" ${GPUS_PER_NODE:+--gpus-per-node "$GPUS_PER_NODE"})
    hosts=$(mktemp)
    exec 8<>"$hosts"
    rm "$hosts"
    printf '%s\n' "$text" >&8
    hosts=/dev/fd/8
}

# Names of variables that ranks on other hosts need: what env.sh sets or offers.
passed_on() {
    compgen -e | grep -E '^(OMP_|PYTORCH_|MALLOC_|NCCL_|GLOO_|FI_|TORCH_|TRITON_|MPI4PY_|DS_ACCELERATOR$)' | LC_ALL=C sort
}

# Whether something listens at this port of this host.
port_in_use() {
    (exec 7<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

refuse() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}
