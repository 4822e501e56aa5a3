"""Figures of GPUs and models that the roofline computes with.

`gpus.yaml` and `models.yaml` hold the figures and say where each comes from; `figures.py` reads them. To add
a GPU or a model, add its figures there and its profiles in `roofline_profiles.py`.
"""
