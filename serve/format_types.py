"""What a chat request says about the form of its answer: tools, tool_choice and response_format, strictly typed."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


# Branches of unions. In the place of a fault pydantic names the branch as if it were a field.
STRING, LIST, OBJECT = "<string>", "<list>", "<object>"


def branch_by(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Chooses the branch of a union that a value is meant for: else pydantic reports what is wrong in every one."""
    return Discriminator(kind, custom_error_type="branch", custom_error_message=f"Input should be {expected}")


def json_type(value: Any) -> str | None:
    return {str: STRING, list: LIST, dict: OBJECT}.get(type(value))


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def kind_of(model: type[BaseModel], field: str, value: Any) -> str | None:
    """What `field` says of an object that is still to be validated; None unless it is one of what it may say."""
    kind = value.get(field) if isinstance(value, dict) else None
    return kind if kind in get_args(model.model_fields[field].annotation) else None


class Typed(Strict):
    """An object whose field `type` names the one that it has of the others, or none of them."""

    @model_validator(mode="before")
    @classmethod
    def _holds_what_it_says(cls, value: Any) -> Any:
        # Before the fields are looked at: what is wrong in one that should not be there does not matter.
        kind = kind_of(cls, "type", value)
        if kind is None:
            return value
        given = {name for name in cls.model_fields if value.get(name) is not None}
        if kind in cls.model_fields and kind not in given:
            raise ValueError(f"{kind}: is missing")
        for name in sorted(given - {"type", kind}):
            raise ValueError(f"{name}: not with type {kind}")
        return value


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


class ToolChoice(Typed):
    """One function that has to be called, or a selection of the tools."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(default={"type": "object"}, alias="schema")
    strict: bool | None = None  # the schema is kept either way


class ResponseFormat(Typed):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the answer has to follow, None for free text."""
        return {"text": None, "json_object": {"type": "object"}}.get(
            self.type, self.json_schema and self.json_schema.schema_
        )


class AnswerForm(Strict):
    """The fields of a chat request about the form of its answer."""

    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag(STRING)] | Annotated[ToolChoice, Tag(OBJECT)],
            branch_by(json_type, "'auto', 'none', 'required' or an object"),
        ]
        | None
    ) = None
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
