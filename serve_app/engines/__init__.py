"""Engines: whatever answers the OpenAI API behind one pool replica.

Read `engine.py` first (the seam: an ASGI app with a life cycle and a load), then the engine you care about:
`vllm.py` (vLLM's own server in this process), `remote.py` (a server that runs elsewhere), `emulated.py` (no
GPU at all). The emulated one rests on `step_time.py`, `profiles.py` and the pure model in `emulation`, which
the simulator shares.
"""
