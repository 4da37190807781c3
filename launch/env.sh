# Environment of every rank; the scripts beside this file source it. A value that is set already stays.

# Threads of one rank: the cores of a host divided by its ranks, 1 where the GPUs do the work. Unset, each rank takes them all.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# GPU memory: segments that grow instead of new ones of fixed size. Tensors grow with the spans from step to step, and
# blocks of yesterday's sizes would stay behind as holes. (PYTORCH_CUDA_ALLOC_CONF is the variable's older name.)
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"

# CPU memory: glibc keeps what is freed, instead of handing large blocks back to the kernel and getting them anew, page
# by page, in every step (docs/memory.md has what it brings).
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_:-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"

# No GPU: tells DeepSpeed so, instead of letting it search (and warn).
# export DS_ACCELERATOR=cpu

# Several network interfaces: which one NCCL (GPUs) or gloo (CPUs) uses, where it picks a wrong one.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

# Ranks hang or fail while they meet: makes NCCL say what it finds. No InfiniBand: keeps NCCL from looking for it.
# export NCCL_DEBUG=INFO NCCL_IB_DISABLE=1
