"""The words that conversations of a target begin and go on with: system prompts, first words of questions, and later
questions of the same conversation.

Owns the words, all of them ours, and the share of each kind. Invariant: no benchmark's prompt and none of the exam is
here (`tests/test_check_material.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

SYSTEMS: tuple[str | None, ...] = (  # None: whatever the template itself puts there
    *(None,) * 16,  # most people leave it at that
    "You are a patient teacher. The user asks about a school subject, and you explain it step by step.",
    "You are an experienced programmer. The user wants a function or a short program, and you write it with a few "
    "words of comment.",
    "You solve word problems in arithmetic. Show each calculation on its own line, then state the result.",
    "You are a careful editor. The user hands you a text, and you rewrite, shorten or correct it.",
    "You are a writer of short stories, letters and poems in whatever tone the user likes.",
    "You give practical advice on work, health, travel and the household, in plain words.",
    "You know science and technology well and answer with precise facts.",
    "You play the part the user asks for and never leave it.",
    "You draw out of a text what was asked for, as a list or a table, and add nothing.",
    "You weigh the arguments on both sides of a question before you come to a conclusion.",
)
TALK = (  # first words of what people ask; mostly none, so that the target chooses
    *("",) * 12,
    *(
        "How",
        "What",
        "Why",
        "Can you",
        "Write a",
        "Write an email",
        "Explain",
        "Describe",
        "Imagine",
        "Compare",
        "Give me",
        "Pretend",
    ),
    *("Suggest", "Tell me", "Which", "Is it true that", "Translate", "Rewrite", "Plan", "Solve", "Draft a", "Think of"),
)
SUMS = (  # word problems in arithmetic
    *(
        "A farmer",
        "Maria",
        "If a",
        "There are",
        "Suppose",
        "A train",
        "Tom has",
        "Lena buys",
        "A bakery sells",
        "A shop",
        "Every day",
    ),
    *(
        "In a class of",
        "Omar earns $",
        "The price of",
        "A box holds",
        "Half of",
        "Two friends",
        "A tank",
        "At the market",
        "Nina reads",
    ),
    *(
        "Ben and his sister",
        "A ticket costs",
        "Each week",
        "A rope",
        "Paul is twice as old as",
        "A car drives",
        "Out of 60",
        "Grandma bakes",
    ),
    *("A team", "Sofia saves", "The school", "It takes", "Five workers", "A garden", "Mr. Cole", "On Monday"),
)
CODE = (  # programs, described in words or started
    *("def",) * 6,
    *(
        "import",
        "from typing import",
        "class",
        "Write a Python function",
        "Write a function that",
        "Complete this code:",
        "Fix this code:",
    ),
    *(
        "Given a list",
        "Given a string",
        "Implement",
        "Write a program",
        "What does this code do?",
        "Write a SQL query",
        "Refactor",
    ),
    *(
        "Complete the following Python function:\n\n```python\ndef",
        "Write a class",
        "Write a test for",
        "How do I",
        "```python\n",
    ),
)
LANGUAGES = (
    *("German", "French", "Spanish", "Italian", "Portuguese", "Dutch", "Polish", "Russian", "Turkish", "Swedish"),
    *("Chinese", "Japanese", "Korean", "Arabic", "Czech", "Ukrainian"),
)
FOREIGN_STARTS = (  # how a text in each of the first languages begins
    *(("German", word) for word in ("Die", "Als ich", "Am Montag", "Sehr geehrte")),
    *(("French", word) for word in ("Le", "Dans la", "Hier soir", "Chère")),
    *(("Spanish", word) for word in ("El", "Cuando", "La ciudad", "Hoy")),
    *(("Italian", word) for word in ("La", "Quando", "Ieri", "Nel")),
    *(("Portuguese", word) for word in ("O", "Ontem", "A minha", "Em")),
    *(("Dutch", word) for word in ("De", "Gisteren", "Mijn", "In het")),
    *(("Polish", word) for word in ("W", "Wczoraj", "Kiedy", "Moja")),
    *(("Russian", word) for word in ("В", "Когда", "Вчера", "Мой")),
    *(("Chinese", word) for word in ("我", "在", "昨天", "这")),
    *(("Japanese", word) for word in ("私", "昨日", "この", "東京")),
)
SUMMARIES = (  # a text is handed over, longer than a question; it may be as long as leaves room for an answer
    *("Summarize:", "Summarize the following article:", "Summarize this report:", "Shorten this text:"),
    *("Give the gist of this story in two sentences:", "What are the main points of this text?", "TL;DR of this:"),
    *("Sum up the following news in three bullet points:", "Write a headline and a short summary for this article:"),
    *("Summarise this conversation:", "Condense this section of a textbook into a paragraph:", "The following"),
)
ABOUT_TEXTS = (  # a question and the text that answers it
    *("Read this text and answer the question below it.\n\nText:", "Context:", "Passage:", "Here is an article:"),
    *("Answer only from the following notes.\n\nNotes:", "Given this report, why did it happen?\n\nReport:"),
    *("Read this story:", "Who is mentioned in this text, and what did they do?\n\n", "Document:", "From the manual:"),
    *("Quote the sentence that says when it took place:\n\n", "Is the claim below supported by the text?\n\nText:"),
)
TRANSLATION = (
    *(f"Translate into {language}:" for language in LANGUAGES),
    *(f"Translate the following text into {language}:\n\n" for language in LANGUAGES[:10]),
    *(f"How do you say this in {language}?" for language in LANGUAGES[:8]),
    *(f"Translate from {language} into English:\n\n{word}" for language, word in FOREIGN_STARTS),
    *(f"What does this {language} text say in English?\n\n{word}" for language, word in FOREIGN_STARTS[::2]),
)
EXTRACTION = (
    *(
        "Extract the names from this article:",
        "List all dates and what happened on them:",
        "Which places are named here?",
    ),
    *("Pull the key facts out of this text as JSON:", "Make a table of the people, their jobs and ages:\n\n"),
    *("Find every number in the text and say what it stands for:", "Extract the action items from these minutes:"),
    *("Return name, price and quantity of each item as a JSON array:", "List the arguments for and against:\n\n"),
)
EDITING = (
    *("Rewrite the following text:", "Correct the spelling and grammar:", "Make this sound more formal:"),
    *(
        "Rewrite this e-mail so that it is friendlier:",
        "Turn this into simple English:",
        "Put this into the past tense:",
    ),
    *("Proofread the paragraph and return it corrected:", "Replace passive by active voice:\n\n"),
    *("Rename the variables in this code so that they speak:\n\n```python\n", "Add comments to this code:\n\n```\n"),
    *(
        "Change only what is wrong in this function:\n\n```python\ndef",
        "Convert this code to JavaScript:\n\n```python\n",
    ),
    *("Shorten each sentence, and keep the order:\n\n", "Translate the comments, and leave the code as it is:\n\n```"),
)
LONG = (  # the target writes a text that later questions are about
    *("Write a detailed article about", "Write a long story in which", "Write a news report of 500 words about"),
    *("Write an encyclopedia entry about", "Write a travel guide to", "Write the minutes of a meeting about"),
    *("Write a product description and a data sheet for", "Write a short biography of", "Write a dialogue between"),
    *("Write a manual for", "Write a letter in which", "Make a table with ten rows about", "Write a JSON list of"),
    *("Write a Python module that", "Write a chapter of a textbook on", "Write an essay on", "Write a recipe for"),
)
TALK_FOREIGN = (
    *("Wie", "Warum", "Erkläre", "Schreibe", "Was ist", "Pourquoi", "Comment", "Écris", "Explique", "Quel", "¿Qué"),
    *("¿Cómo", "Escribe", "Explica", "Perché", "Scrivi", "Come", "Por que", "Escreva", "Hoe", "Waarom", "Dlaczego"),
    *("Как", "Почему", "Напиши", "请", "为什么", "如何", "なぜ", "どうやって"),
)
ON_A_TEXT = (  # later questions about a text that is there
    *("Summarize that in three sentences.", "Give it a title and five keywords.", "Now say it in one sentence."),
    *(f"Translate the first paragraph into {language}." for language in LANGUAGES[:10]),
    *(f"Translate your last answer into {language}." for language in LANGUAGES[:6]),
    *("Rewrite the first paragraph in simpler words.", "Make it more formal.", "Repeat it without adjectives."),
    *("Write it again, but shorter.", "Repeat the last paragraph word for word, then continue it."),
    *("List the names, places and numbers in it as a JSON object.", "Put the facts into a Markdown table."),
    *("Ask three questions about the text, and answer each with a quote from it.", "Turn it into bullet points."),
    *("What does it say at the beginning, and what at the end?", "Quote the two most important sentences."),
    *("Which of these statements could be wrong?", "Change all names and leave everything else as it is."),
)
ON_AN_ANSWER = (
    *("Can you give an example?", "Explain that more simply.", "Are you sure? Check it again.", "Go on.", "Why?"),
    *(
        "Put that into a table.",
        "What are the disadvantages?",
        "Say that in one sentence.",
        "And what comes after that?",
    ),
    *(f"Say that in {language}." for language in LANGUAGES[:5]),
)
ON_CODE = (
    *("Add type hints and a docstring.", "Now write tests for it.", "Explain it line by line.", "Make it shorter."),
    *("What if the input is empty? Fix that.", "Rename the variables and show the whole code again."),
    *("Rewrite it in JavaScript.", "What is its complexity? Make it faster.", "Add error handling."),
)
ON_SUMS = (
    *("Check the result in another way.", "Change the numbers and solve it again.", "Write it as one equation."),
    *("Explain the second step.", "What if everything doubles?"),
)
ON_DATA = (
    *(
        "Return it as JSON.",
        "Return it as CSV.",
        "Sort it by the second column.",
        "Add a row that fits.",
        "Drop a column.",
    ),
    *("Which entry is the largest?", "Write a sentence about each row.", "Turn it into a Markdown table."),
)


@dataclass(frozen=True, slots=True)
class KindOfTalk:
    """A kind of conversation: its first words, and what may be asked later."""

    name: str  # in TEXT_KINDS
    starters: tuple[str, ...]  # of the question; the target writes the rest
    share: float  # of all conversations
    later: tuple[str, ...]
    turns: tuple[int, ...]  # how many later questions, each as likely
    long: bool = False  # the question hands over a text


SOMETIMES = (0, 0, 0, 1, 1, 2)
TALKS = (
    KindOfTalk("talk", (*TALK, *TALK_FOREIGN), 0.22, ON_AN_ANSWER, SOMETIMES),
    KindOfTalk("sums", SUMS, 0.11, ON_SUMS, SOMETIMES),
    KindOfTalk("code", CODE, 0.25, ON_CODE, SOMETIMES),
    KindOfTalk("summaries", SUMMARIES, 0.07, ON_A_TEXT, SOMETIMES, long=True),
    KindOfTalk("about", ABOUT_TEXTS, 0.08, ON_A_TEXT, SOMETIMES, long=True),
    KindOfTalk("translation", TRANSLATION, 0.09, ON_AN_ANSWER[:4], SOMETIMES),
    KindOfTalk("extraction", EXTRACTION, 0.04, ON_DATA, SOMETIMES, long=True),
    KindOfTalk("editing", EDITING, 0.05, ON_A_TEXT, SOMETIMES, long=True),
    KindOfTalk("turns", LONG, 0.05, ON_A_TEXT, (2, 3, 4)),
)
DATA_SHARE, DATA_TURNS = 0.04, SOMETIMES  # of questions about tables and records that `given_data.py` makes


def all_words() -> list[str]:
    """Return all words of this file."""
    starters = [starter for kind in TALKS for starter in kind.starters]
    return [*filter(None, SYSTEMS), *starters, *ON_A_TEXT, *ON_AN_ANSWER, *ON_CODE, *ON_SUMS, *ON_DATA]
