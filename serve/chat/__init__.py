"""Chat: OpenAI messages to prompt tokens, and output tokens to reasoning, content and tool calls."""
