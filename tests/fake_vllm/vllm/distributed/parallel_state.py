"""As in vLLM 0.32, with one rank."""


def get_tensor_model_parallel_rank() -> int:
    return 0
