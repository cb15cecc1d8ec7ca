"""Fields and endpoints of OpenAI's, Anthropic's and vLLM's APIs, as the mesh reads them."""
