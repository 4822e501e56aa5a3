"""The reading of a request, before it is scheduled.

Read `incoming` (a request, and the job that is made of it), `reader` (its body is read and checked), then
`endpoints` (what is read of each, by path), over `fields` (the parts of bodies that are looked at), `measure`
(sizes of prompts) and `prefix` (hashes of how they begin). `body` has the limits on bodies, `headers` both
ways of headers, `served_models` the names that clients may ask for.
"""
