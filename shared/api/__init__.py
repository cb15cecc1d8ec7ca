"""What the mesh reads of the APIs of OpenAI, Anthropic and vLLM: fields, endpoints, streams."""
