"""The operations a step spends its time in, each with a torch reference and a Triton kernel.

| file | operation |
|---|---|
| `attention.py` | new tokens against the KV cache: causal, grouped heads, optional sliding window |
| `gate.py` | router and top-k: which experts a token goes to, and with which weights |
| `expert_gemm.py` | SwiGLU up, down and the weighted sum, over experts addressed by pointer |
| `linear.py` | every other matrix product |
| `norm.py` | RMS norm |
| `rope.py` | rotary embedding, and the new rows of the KV cache |
| `residency.py` | which expert lies in which slot, decided on the device |

The device decides: a CPU tensor takes the reference, a CUDA tensor the kernel of `*_triton.py`,
which is imported at that moment and not before. Nothing here knows of slots, files or models; but
`cache_triton.py` sees to it that compiled kernels have a folder.
"""
