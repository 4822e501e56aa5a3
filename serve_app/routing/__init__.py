"""How long is a request, which pools may take it, and what does each replica hold already?

Read `text` (what kind of text is it), `ratio`, `overhead` and `output_length` (what is learned of the
model's tokenizer, chat template and answers), then `estimate`, which puts them together. `pools` turns an
estimate into pools; `replica`, `ledger` and `rate` account for what has been sent where. All of it is
pure, and O(1) for each request.
"""

from serve_app.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.routing.estimation.text_category import classify

__all__ = ["EstimatorSettings", "TokenEstimate", "TokenEstimator", "classify"]
