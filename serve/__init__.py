"""Serving: lossless tree speculation over the paged cache, and the OpenAI-compatible server on top of it."""
