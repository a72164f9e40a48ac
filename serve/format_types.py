"""What a chat request says about the form of its answer: tools, tool_choice and response_format, strictly typed."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionDefinition(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class ToolChoice(Strict):
    """One function that has to be called, or a selection of the tools."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _holds_what_it_says(self) -> "ToolChoice":
        other = "allowed_tools" if self.type == "function" else "function"
        if (self.function if self.type == "function" else self.allowed_tools) is None:
            raise ValueError(f"{self.type}: is missing")
        if (self.allowed_tools if self.type == "function" else self.function) is not None:
            raise ValueError(f"{other}: not in a choice of type {self.type}")
        return self


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")
    strict: bool | None = None  # the schema is kept either way


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _holds_what_it_says(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema: goes with type json_schema, and only with it")
        return self

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the answer has to follow, None for free text."""
        return {"text": None, "json_object": {"type": "object"}}.get(
            self.type, self.json_schema and self.json_schema.schema_
        )
