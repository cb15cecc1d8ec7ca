"""OpenAI's Batch API: files of requests that the mesh answers until the end of a window."""
