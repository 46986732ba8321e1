"""The markers of the cmd4 chat format: each is one special token of the vocabulary, found there by its spelling."""

from enum import StrEnum


class Marker(StrEnum):
    """A cmd4 marker; its value is its spelling."""

    START_OF_TURN = "<|START_OF_TURN_TOKEN|>"
    END_OF_TURN = "<|END_OF_TURN_TOKEN|>"
    SYSTEM = "<|SYSTEM_TOKEN|>"
    USER = "<|USER_TOKEN|>"
    CHATBOT = "<|CHATBOT_TOKEN|>"
    START_TEXT = "<|START_TEXT|>"
    END_TEXT = "<|END_TEXT|>"
    START_THINKING = "<|START_THINKING|>"
    END_THINKING = "<|END_THINKING|>"
    START_ACTION = "<|START_ACTION|>"
    END_ACTION = "<|END_ACTION|>"
    START_TOOL_RESULT = "<|START_TOOL_RESULT|>"
    END_TOOL_RESULT = "<|END_TOOL_RESULT|>"
