"""The documents that claims quote, by the names under which tables and pages list them."""

from __future__ import annotations

__all__ = [
    "AHN",
    "AMIT",
    "CASTIN",
    "DEMIRCIGIL",
    "DONG",
    "GARG",
    "GESHKOVSKI",
    "GESHKOVSKI_2024",
    "KAJITSUKA",
    "KROTOV",
    "LUCIBELLO",
    "MCELIECE",
    "MILLIDGE",
    "OSWALD",
    "OURS",
    "PAPER",
    "RAMSAUER",
    "RAN_MILO",
    "RAVENTOS",
    "SANDER",
    "SANTOS",
    "SLIDES",
    "SOHN",
    "TARZANAGH",
    "THRAMPOULIDIS",
    "VASUDEVA",
    "VELICKOVIC",
    "XIE",
    "YUN_2019",
    "YUN_2020",
    "ZAHEER",
    "ZHAI",
    "ZHANG",
]

PAPER = "A Probabilistic Interpretation of Transformers"
SLIDES = "A perspective on the fundamentals of transformers (slides)"
OURS = "Massieu"  # statements of this project

AHN = "Ahn et al. 2023"
AMIT = "Amit et al. 1985"
CASTIN = "Castin et al. 2024"
DEMIRCIGIL = "Demircigil et al. 2017"
DONG = "Dong et al. 2021"
GARG = "Garg et al. 2022"
GESHKOVSKI = "Geshkovski et al. 2023"
GESHKOVSKI_2024 = "Geshkovski et al. 2024"
KAJITSUKA = "Kajitsuka and Sato 2023"
KROTOV = "Krotov and Hopfield 2016"
LUCIBELLO = "Lucibello and Mézard 2024"
MCELIECE = "McEliece et al. 1987"
MILLIDGE = "Millidge et al. 2022"
OSWALD = "von Oswald et al. 2022"
RAMSAUER = "Ramsauer et al. 2020"
RAN_MILO = "Ran-Milo 2026"
RAVENTOS = "Raventós et al. 2023"
SANDER = "Sander et al. 2022"
SANTOS = "Santos et al. 2024"
SOHN = "Sohn 2016"
TARZANAGH = "Tarzanagh et al. 2023"
THRAMPOULIDIS = "Thrampoulidis 2024"
VASUDEVA = "Vasudeva et al. 2024"
VELICKOVIC = "Veličković et al. 2024"
XIE = "Xie et al. 2022"
YUN_2019 = "Yun et al. 2019"
YUN_2020 = "Yun et al. 2020"
ZAHEER = "Zaheer et al. 2020"
ZHAI = "Zhai et al. 2023"
ZHANG = "Zhang et al. 2023"
