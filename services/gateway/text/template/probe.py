"""A probe at load time: whether a chat template renders any conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from services.core.errors import FailedPrecondition, InvalidInput
from services.gateway.text.template.chat_template import ChatTemplate, ControlTokens
from services.gateway.text.template.sandbox import MAX_TEMPLATE_BYTES, BudgetExceeded, TemplateRefused
from services.gateway.text.text_model import Message
from services.ports.clock import Clock

# A template may require or forbid a system message without any declaration.
_PROBES: Final = (
    (Message("user", "Hi"),),
    (Message("system", "Hi"), Message("user", "Hi")),
    (Message("user", "Hi"), Message("assistant", "Hi"), Message("user", "Hi")),
)
_MAX_SHOWN: Final = 200


def open_template(
    read: Callable[[], str], *, control: ControlTokens, tokens: Mapping[str, str], clock: Clock
) -> tuple[ChatTemplate | None, str]:
    """Return the template that ``read`` returns, and why it renders no conversation: empty if it renders one.

    An empty source is no template. FailedPrecondition of ``read`` counts as a fault too.
    """
    try:
        source = read()
        if not source:
            return None, ""
        template = ChatTemplate(source, control=control, tokens=tokens, clock=clock)
    except FailedPrecondition as error:
        return None, _shown(error)
    faults: list[str] = []
    for messages in _PROBES:
        try:
            template.render(messages, max_chars=MAX_TEMPLATE_BYTES)
        except (FailedPrecondition, InvalidInput) as error:
            if isinstance(error.__cause__, TemplateRefused):  # a deliberate rejection: the template works
                return template, ""
            if isinstance(error.__cause__, BudgetExceeded):  # other conversations would take as long
                return template, _shown(error)
            faults.append(_shown(error))
        else:
            return template, ""
    return template, faults[0]


def _shown(error: FailedPrecondition | InvalidInput) -> str:
    """Return an error with its cause, which contains no client text here."""
    cause = str(error.__cause__ or "")[:_MAX_SHOWN]
    return error.message if not cause or cause in error.message else f"{error.message}: {cause}"
