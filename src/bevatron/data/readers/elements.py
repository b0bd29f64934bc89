"""Chemical symbols and atomic numbers."""

_TABLE = """
X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As
Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd
Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am
Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og
"""

SYMBOLS: tuple[str, ...] = tuple(_TABLE.split())
"""Chemical symbols by atomic number; 0 is not an element."""

ATOMIC_NUMBERS: dict[str, int] = {symbol: z for z, symbol in enumerate(SYMBOLS) if z}

PDB_NUMBERS = {symbol.upper(): z for symbol, z in ATOMIC_NUMBERS.items()} | {"D": 1, "T": 1}
"""Atomic numbers by symbols as the PDB writes them, isotopes of hydrogen among them."""


def element_symbol(text: str) -> str:
    """Write a symbol with one capital, or turn an atomic number in text into its symbol.

    Examples
    --------
    >>> element_symbol("CL"), element_symbol("17")
    ('Cl', 'Cl')
    """
    if text.isdigit() and 1 <= int(text) < len(SYMBOLS):
        return SYMBOLS[int(text)]
    return text.capitalize()
