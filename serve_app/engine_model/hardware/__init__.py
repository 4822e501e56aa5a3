"""Figures of GPUs and models, the input of the roofline.

`gpus.yaml` and `models.yaml` hold the figures with the source of each; `figures` reads them. To add a GPU or
a model, add its figures there, and its profiles in `roofline_profiles`.
"""
