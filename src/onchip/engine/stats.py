"""What an engine did, counted."""

from dataclasses import dataclass, field


@dataclass
class Stats:
    """What the engine did since the last `generate` began, or since it was made: tokens, seconds, bytes, and which kernel ran each operator.

    The first three, and `first_token_seconds`, `generate` counts as it ends: who calls `step` finds them in requests.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, that the prefix cache knew
    new_tokens: int = 0
    decoded_tokens: int = 0  # those of steps that only decoded
    prefill_seconds: float = 0.0  # of steps with chunks of prompts in them
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    cache_bytes: int = 0  # the most that was in use, by the prefix cache too
    preemptions: int = 0
    drafted_tokens: int = 0  # that a draft guessed
    accepted_tokens: int = 0  # of these, that the model drew itself
    cascade_steps: int = 0  # those that read once what several requests share
    kernels: dict[str, str] = field(default_factory=dict)
