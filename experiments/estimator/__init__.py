"""Token estimates on real text with real tokenizers."""
