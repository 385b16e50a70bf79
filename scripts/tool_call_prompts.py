"""Twenty simple prompts and the functions that answer them, for `measure_tool_calls.py`.

Owns prompts and functions, which were written before any model had seen them. Invariant: every prompt names all that
its function requires, so a model has nothing to guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A prompt, and the function that answers it."""

    prompt: str
    function: str


def _function(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"type": "string"}
FUNCTIONS = (
    _function(
        "get_weather",
        "Get the weather forecast for a city.",
        ["city"],
        city=TEXT,
        days={"type": "integer", "minimum": 1, "maximum": 10},
    ),
    _function(
        "convert_currency",
        "Convert an amount of money from one currency to another.",
        ["amount", "source", "target"],
        amount={"type": "number"},
        source={"type": "string", "description": "ISO code, such as USD"},
        target={"type": "string", "description": "ISO code, such as EUR"},
    ),
    _function(
        "send_message",
        "Send a text message to a person.",
        ["recipient", "text"],
        recipient=TEXT,
        text=TEXT,
    ),
    _function(
        "set_timer",
        "Set a timer.",
        ["minutes"],
        minutes={"type": "integer", "minimum": 1},
        label=TEXT,
    ),
    _function(
        "search_products",
        "Search the shop for products.",
        ["query"],
        query=TEXT,
        max_price={"type": "number"},
        sort={"enum": ["price", "rating", "newest"]},
    ),
    _function(
        "set_light",
        "Switch the light of a room on or off.",
        ["room", "on"],
        room={"enum": ["kitchen", "bedroom", "bathroom", "garage"]},
        on={"type": "boolean"},
    ),
    _function(
        "book_table",
        "Book a table at a restaurant.",
        ["restaurant", "people", "time"],
        restaurant=TEXT,
        people={"type": "integer", "minimum": 1},
        time={"type": "string", "description": "HH:MM"},
    ),
    _function(
        "add_numbers",
        "Add up a list of numbers.",
        ["numbers"],
        numbers={"type": "array", "items": {"type": "number"}},
    ),
)

CASES = (
    Case("What will the weather be like in Oslo?", "get_weather"),
    Case("Show me the forecast for Lisbon for the next 3 days.", "get_weather"),
    Case("Is it going to rain in Nairobi tomorrow?", "get_weather"),
    Case("Convert 250 USD to EUR.", "convert_currency"),
    Case("How much are 80 British pounds (GBP) in Japanese yen (JPY)?", "convert_currency"),
    Case("I have 19.99 EUR. What is that in CHF?", "convert_currency"),
    Case("Send Maria the message 'I will be ten minutes late'.", "send_message"),
    Case("Text my brother Tom that dinner is ready.", "send_message"),
    Case("Set a timer for 12 minutes.", "set_timer"),
    Case("Remind me of the pasta in 9 minutes with a timer called pasta.", "set_timer"),
    Case("Find running shoes that cost less than 100 dollars.", "search_products"),
    Case("Search for a desk lamp and sort the results by rating.", "search_products"),
    Case("Look for the newest headphones.", "search_products"),
    Case("Turn on the light in the kitchen.", "set_light"),
    Case("Switch off the bedroom light, please.", "set_light"),
    Case("Please make sure that the garage light is off.", "set_light"),
    Case("Book a table for 4 people at Luigi's at 19:30.", "book_table"),
    Case("Reserve a table for two at the Golden Dragon at 20:00.", "book_table"),
    Case("Add up 3, 17 and 22.5.", "add_numbers"),
    Case("What is the sum of 101, 202, 303 and 404?", "add_numbers"),
)
