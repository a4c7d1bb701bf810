"""Every bound of the domain: its name, its default, and why it is that.

A limit is refused with its count in the error. All of them are settings (`PLAIT_LIMIT_…`).
"""

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    text_bytes: int = 1024 * 1024  # NATS refuses messages above 1 MiB by default
    inline_bytes: int = 256 * 1024  # larger content goes to the object store, not into the append
    inbox_entries: int = 256  # what one turn could still be asked to read at once
    wait_default_s: float = 300.0  # a person's patience; a wait must never be endless
    wait_max_s: float = 24 * 3600.0
    turn_steps: int = 64  # model calls; a model in a loop stops here
    turn_calls: int = 64  # tool calls of one model answer
    turn_time_s: float = 30 * 60.0  # running, not waiting
    turn_output_tokens: int = 128_000  # all its answers: 64 steps of 2,000
    turn_total_tokens: int = 4_000_000  # read and written: 64 steps at 60,000 of context
    model_stall_s: float = 60.0  # without a token; longer than a cold start, shorter than patience
    model_attempts: int = 6  # calls in a row that fail for now: with the pauses half a minute
    model_pause_s: float = 0.5  # before the second of them, doubled each time
    model_pause_max_s: float = 60.0  # a provider that says when may ask for up to wait_max_s
    turn_attempts: int = 10  # deliveries of one work item before the turn ends as an error
    chain_hops: int = 32  # messages in one chain of cause and effect
    name_chars: int = 64
    title_chars: int = 200
    command_ids: int = 256  # remembered per branch for retries after lost answers
    append_events: int = 1000  # a node's seq keeps ten bits for the event's index
