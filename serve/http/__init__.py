"""HTTP/1.1 on asyncio and h11: connections, limits, routing, streaming. Knows nothing about models or OpenAI."""
