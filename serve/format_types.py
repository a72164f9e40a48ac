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

    def for_model(self) -> dict[str, Any]:
        """What the prompt says of it: all but how strictly it is taken here."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


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


class AnswerForm(Strict):
    """The fields of a chat request about the form of its answer."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _tools_fit(self) -> "AnswerForm":
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("tools: two of them have the same name")
        if not names and (self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)):
            raise ValueError("tool_choice: there are no tools to choose from")
        wrong = next((name for name in self.callable_names or () if name not in names), None)
        if wrong is not None:
            raise ValueError(f"tool_choice: {wrong!r} is none of the tools")
        if self.must_call and self.schema is not None:
            raise ValueError("response_format: does not go with a tool_choice by which the answer has to be a call")
        return self

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        if self.tool_choice == "none":
            return []
        return [tool.for_model() for tool in self.tools or []]

    @property
    def callable_names(self) -> list[str] | None:
        """The only tools that may be called, None for all."""
        if not isinstance(self.tool_choice, ToolChoice):
            return None
        chosen = self.tool_choice
        named = [chosen] if chosen.allowed_tools is None else chosen.allowed_tools.tools
        return [tool.function.name for tool in named]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice == "required"

    @property
    def single_call(self) -> bool:
        named = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.type == "function"
        return named or self.parallel_tool_calls is False

    @property
    def schema(self) -> dict[str, Any] | None:
        """What a text answer has to follow."""
        return self.response_format and self.response_format.schema

    @property
    def constrained(self) -> bool:
        """Whether the answer has a form, or its calls have one."""
        if self.schema is not None or self.must_call:
            return True
        strict = any(tool.function.strict for tool in self.tools or [])
        return bool(self.offered_tools) and (strict or self.single_call or self.callable_names is not None)
