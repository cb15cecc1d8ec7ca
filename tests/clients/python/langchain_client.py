"""LangChain: bound tools and structured output. Prints one JSON object."""

import json
import os
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Pick(BaseModel):
    """Pick items."""

    count: int = Field(ge=0, le=99)


chat = ChatOpenAI(
    base_url=os.environ["BASE_URL"],
    model=os.environ["MODEL"],
    api_key="unused",
    temperature=0,
    max_tokens=500,
)
called = chat.bind_tools([Pick], tool_choice="required", strict=True).invoke("Pick some items.")
found = chat.with_structured_output(Pick, method="json_schema").invoke("Pick some items.")
json.dump({"call": called.tool_calls[0], "found": found.model_dump()}, sys.stdout)
