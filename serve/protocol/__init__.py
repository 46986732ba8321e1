"""The OpenAI protocol as types and rules: request and response structs, checks, error objects. No HTTP, no engine."""
