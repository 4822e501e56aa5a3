"""An engine without a model: real timing and metrics, placeholder text.

`app` is its HTTP side, `driver` runs the engine model in real time, `admission` refuses as vLLM does,
`answers` and `responses` write OpenAI's shapes.
"""
