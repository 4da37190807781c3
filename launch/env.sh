# Environment of every rank; the scripts beside this file source it. A value that is set already stays: what a submission
# exports wins (`sbatch --export=ALL,NCCL_DEBUG=INFO …`). Lines that begin with # are examples to enable.

# Processor ------------------------------------------------------------------------------------------------------------

# Threads of one rank: the cores of a host divided by its ranks, 1 where the GPUs do the work. Unset, each rank takes them all.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# CPU memory: glibc keeps what is freed, instead of handing large blocks back to the kernel and getting them anew, page
# by page, in every step (docs/memory.md has what it brings).
export MALLOC_MMAP_MAX_="${MALLOC_MMAP_MAX_:-0}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"

# No GPU: tells DeepSpeed so, instead of letting it search (and warn).
# export DS_ACCELERATOR=cpu

# GPU ------------------------------------------------------------------------------------------------------------------

# GPU memory: segments that grow instead of new ones of fixed size. Tensors grow with the spans from step to step, and
# blocks of yesterday's sizes would stay behind as holes. (PYTORCH_CUDA_ALLOC_CONF is the variable's older name.)
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"

# What is compiled on the first run (kernels of triton, heads on CPUs): a folder of the node's own is faster than a shared
# one that 64 ranks lock; without these it is in the home folder.
# export TRITON_CACHE_DIR=/tmp/$USER/triton TORCH_EXTENSIONS_DIR=/tmp/$USER/torch_extensions

# Network --------------------------------------------------------------------------------------------------------------

# Several interfaces: which one NCCL (GPUs) or gloo (CPUs) meets at, where it picks a wrong one. "^" leaves out.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# export NCCL_SOCKET_IFNAME=^docker,lo

# InfiniBand or RoCE: which adapters NCCL uses, those beside the GPUs; for RoCE also the address that all hosts route (often 3).
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
# export NCCL_IB_GID_INDEX=3

# No InfiniBand: keeps NCCL from looking for it.
# export NCCL_IB_DISABLE=1

# Fabrics under libfabric (AWS EFA, HPE Slingshot), with NCCL's plug-in for it installed.
# export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
# export FI_PROVIDER=cxi FI_CXI_DISABLE_HOST_REGISTER=1 NCCL_CROSS_NIC=1

# Ranks hang or fail while they meet: makes NCCL say what it finds.
# export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
