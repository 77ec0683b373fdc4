"""Ways of weights between machines: relays over Gloo or NCCL, and RDMA reads."""
