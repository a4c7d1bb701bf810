"""The bodies that commands take and their answers; queries answer with the views' own shapes."""

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from plait.events.commands import MultitaskStrategy
from plait.events.providers import Kind, ProviderView
from plait.projections.queries import MessageView, SessionItem, TurnView

_TEXT = "At most 1 MiB of UTF-8 by default; no NUL, and more than white space."
ADDRESS = "a branch's name or id, `session:name`, a unique prefix of its name, or one of its nodes"


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """The root of all bodies: unknown fields are refused."""


class NewSession(Body, frozen=True, kw_only=True):
    title: Annotated[str | None, Meta(description="At most 200 characters.")] = None
    system_prompt: Annotated[
        str | None, Meta(description="What every turn of the session begins with.")
    ] = None
    model: Annotated[
        str | None,
        Meta(
            description="`provider:model`: one of the tenant's providers, `openai`, `anthropic` or "
            "`offline`; the server's default without.",
            examples=["offline:echo"],
        ),
    ] = None
    attended: Annotated[bool, Meta(description="A person is there to be asked for approvals.")] = (
        True
    )


class NewMessage(Body, frozen=True, kw_only=True):
    """At most one of `branch`, `after` and `replaces`; without, it goes to HEAD's branch."""

    text: Annotated[str, Meta(min_length=1, description=_TEXT, examples=["What is a lane?"])]
    branch: Annotated[str | None, Meta(description=f"Post to this branch: {ADDRESS}.")] = None
    after: Annotated[
        str | None,
        Meta(
            description="Go on from this node: on its branch while it is the tip there, else on "
            "a new branch that forks there."
        ),
    ] = None
    replaces: Annotated[
        str | None,
        Meta(description="Open a new branch with a sibling of this node: edit a message."),
    ] = None
    run: Annotated[bool, Meta(description="Ask for a turn of the model.")] = True
    multitask_strategy: Annotated[
        MultitaskStrategy,
        Meta(
            description="When a turn is under way: wait for it (`enqueue`), refuse (`reject`), "
            "stop it and keep what it did (`interrupt`), or stop and drop it (`rollback`)."
        ),
    ] = "enqueue"


class Checkout(Body, frozen=True, kw_only=True):
    node_id: Annotated[str, Meta(description="A user or assistant node, or ROOT.")]


class BranchPatch(Body, frozen=True, kw_only=True):
    name: Annotated[
        str | UnsetType | None,
        Meta(description="Unique in the session; null takes the name away."),
    ] = UNSET
    archived: Annotated[
        bool | UnsetType,
        Meta(
            description="true closes the branch for new messages, and refuses those that wait in "
            "its inbox; a running or suspended turn finishes. false opens it again."
        ),
    ] = UNSET


class NewSend(Body, frozen=True, kw_only=True):
    target_branch: Annotated[str, Meta(description=f"Who gets it: {ADDRESS}.")]
    message: Annotated[str, Meta(min_length=1, description=_TEXT, examples=["What did you find?"])]
    from_: Annotated[
        str | None, Meta(description="The sending branch, or one of its nodes; HEAD without.")
    ] = None
    wait_reply: Annotated[
        bool, Meta(description="Start a turn on the target, and wait for its reply.")
    ] = False
    timeout_s: Annotated[
        float | None,
        Meta(description="When the wait ends; 300 by default and 86400 at most.", examples=[60]),
    ] = None


class NewProvider(Body, frozen=True, kw_only=True):
    """The whole of it: what is left out is not set."""

    kind: Annotated[
        Kind,
        Meta(description="The wire format: OpenAI's chat completions, or Anthropic's messages."),
    ]
    base_url: Annotated[
        str | None,
        Meta(
            description="http(s), without credentials; the provider's own without.",
            examples=["http://127.0.0.1:11434/v1"],
        ),
    ] = None
    key: Annotated[
        str | None,
        Meta(description="Stored encrypted, and never shown again.", examples=["a key"]),
    ] = None
    headers: Annotated[
        dict[str, str],
        Meta(description="Sent with each call. The values are stored encrypted.", examples=[{}]),
    ] = {}
    stall_s: Annotated[
        float | None,
        Meta(description="Seconds without a token until a call counts as failed; 60 without."),
    ] = None

    def __repr__(self) -> str:
        return f"NewProvider({self.kind!r})"  # The rest may end up in a log line.


class Answer(Struct, frozen=True, kw_only=True):
    """`position` covers the command: give it to a query as `min_position` to see the command."""

    position: Annotated[str, Meta(examples=["1767225600000.42.0"])]


class SessionMade(Answer, frozen=True, kw_only=True):
    session_id: str
    branch_id: str
    head_id: str


class MessagePosted(Answer, frozen=True, kw_only=True):
    """`turn_id` is the turn that will read the message; null with `run` false."""

    node_id: str
    branch_id: str
    turn_id: str | None


class CheckedOut(Answer, frozen=True, kw_only=True):
    branch_id: str
    head_id: str


class BranchPatched(Answer, frozen=True, kw_only=True):
    branch_id: str
    name: str | None
    archived: bool


class MessageSent(Answer, frozen=True, kw_only=True):
    message_id: str


class TurnCancelled(Answer, frozen=True, kw_only=True):
    turn_id: str
    branch_id: str


class TurnRetried(Answer, frozen=True, kw_only=True):
    turn_id: str
    branch_id: str


class TurnDone(TurnView, frozen=True, kw_only=True):
    """The turn that read the posted message, ended."""

    position: str


class MessageDone(MessageView, frozen=True, kw_only=True):
    """The sent message, with its reply."""

    position: str


class SessionList(Struct, frozen=True, kw_only=True):
    items: list[SessionItem]
    next_page_token: str | None


class ProviderList(Struct, frozen=True, kw_only=True):
    items: list[ProviderView]


class Health(Struct, frozen=True, kw_only=True):
    status: Annotated[str, Meta(examples=["ok"])]


BODIES = (NewSession, NewMessage, Checkout, BranchPatch, NewSend, NewProvider)
