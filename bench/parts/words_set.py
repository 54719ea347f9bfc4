"""The fixed set of ``bench.words``: questions written for this project, none from a published benchmark."""

YES_NO = [
    "Is water wet?", "Is the sun cold?", "Do birds have feathers?", "Can fish walk?", "Is ice frozen water?",
    "Is seven an even number?", "Does a week have seven days?", "Is a spider a mammal?", "Is Paris in France?",
    "Do cats bark?", "Is gold a metal?", "Is the sea salty?", "Do trees grow on clouds?", "Is snow white?",
    "Can a stone swim?", "Is bread made of flour?", "Is a circle round?", "Do cows lay eggs?", "Is fire hot?",
    "Is the moon a star?", "Is milk a drink?", "Do snakes have legs?", "Is ten more than nine?", "Is night dark?",
    "Should towns ban cars?", "Should homework be abolished?", "Is chess a game?", "Is glass made of sand?",
    "Do whales live in trees?", "Is winter warmer than summer?", "Is honey sweet?", "Is a lemon sour?",
    "Does a triangle have four sides?", "Is rain dry?", "Do we breathe air?", "Is a bicycle a vehicle?",
    "Is a whisper loud?", "Is an hour longer than a minute?", "Can paper burn?", "Is a needle sharp?",
]  # fmt: skip
REVIEWS = [
    "The soup was cold and the waiter rude.", "I loved every minute of it.", "The parcel arrived on Tuesday.",
    "Never again, what a waste of money.", "Works as described.", "The best chair I have ever owned.",
    "It broke after one day.", "The box is blue.", "A wonderful evening with friends.", "The lid does not close.",
    "There are twelve pages.", "My daughter smiles whenever she sees it.", "Noisy, slow and ugly.",
    "The shop opens at nine.", "It saved my holiday.", "The colour faded in a week.", "It is made of wood.",
    "I would buy it again at once.", "The manual is missing.", "Fast, quiet and cheap.",
]  # fmt: skip
PEOPLE = [
    "Anna is 31 and lives in Oslo.", "Ben, 44, moved to Lima last year.", "At 27, Chi works in Hanoi.",
    "Dora turned 65 in Rome.", "Emil is a 19 year old student in Graz.", "Fay, aged 52, runs a shop in Cork.",
    "Gil from Porto is 38.", "Hana has lived in Kyoto for all of her 70 years.", "Ivo is 23 and sails from Split.",
    "Judy, who is 48, teaches in Leeds.", "Kofi is 33 and cooks in Accra.", "Lena, 29, paints in Kiel.",
    "Milo is 12 and goes to school in Turin.", "Nora, 81, gardens in Bergen.", "Omar is 36 and drives in Cairo.",
    "Pia, 55, sings in Lugano.", "Quinn is 41 and writes in Galway.", "Rosa, 62, sells fish in Vigo.",
    "Sven is 47 and farms near Lund.", "Tara, 25, dances in Pune.",
]  # fmt: skip
DATES = [
    "The treaty was signed on the 3rd of May 1921.", "She was born on 14 February 1980.", "It opened on July 1, 1999.",
    "The storm came on 22 October 2015.", "They met on the 9th of December 2003.", "He left on March 30, 1944.",
    "The first train ran on 7 August 1862.", "We moved in on 11 November 2011.", "The bridge fell on 2 June 1977.",
    "The shop closed on January 31, 2020.", "It was built by 5 April 1888.", "The vote was on 18 September 2014.",
    "The comet was seen on 25 December 1758.", "The law passed on 6 February 1918.", "Rain fell on 12 July 2023.",
    "The school began on 1 September 1956.", "It sank on 15 April 1912.", "The fair ended on October 31, 1893.",
    "The book appeared on 24 November 1859.", "The line was cut on 10 May 1869.",
]  # fmt: skip
TOPICS = [
    "Should towns ban cars from their centres?", "Should homework be abolished?", "Should museums be free?",
    "Should software come with a warranty?", "Is a dog a better friend than a cat?", "Should shops close on Sundays?",
    "Is it better to live by the sea or in the mountains?", "Should children have telephones?",
]  # fmt: skip
WEATHER = [
    ("Oslo", "celsius", 3), ("Lima", "fahrenheit", 1), ("Rome", "celsius", 7), ("Cork", "celsius", 2),
    ("Kyoto", "fahrenheit", 5), ("Accra", "celsius", 4), ("Kiel", "celsius", 6), ("Turin", "fahrenheit", 2),
    ("Cairo", "celsius", 1), ("Vigo", "celsius", 3), ("Lund", "fahrenheit", 7), ("Pune", "celsius", 5),
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of the coming days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "description": "how many days from today"},
            },
            "required": ["city", "unit", "days"],
        },
    },
}
