"""Figures of GPUs and models, the input of the roofline.

`gpus.yaml` and `models.yaml` hold the figures with the source of each; `figures` reads them.
`model_config` reads the architecture of any other model from its own `config.json`. To add a GPU or
a model, add its figures there, and its profiles in `roofline_profiles`.
"""
