"""What an answer says where the request prescribes it: constraints, tool calls, stop strings, logprobs.

Nothing here is imported or run for a request that asks for plain text. Read `spec` (what a request asks for),
`constraints` and `tools` (how it is read), `texts` (how a constraint becomes text), `script` (how the text
becomes tokens that end in time), then the samplers: `schema_sampler` over `schema_merge`, `strings`,
`numbers` and `patterns`.
"""
