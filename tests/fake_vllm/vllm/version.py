"""The names of vLLM that examples/vllm_connector uses, in vLLM 0.32's form, for tests and types without vLLM."""

__version__ = "0.32.0"
