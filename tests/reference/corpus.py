"""The texts of the reference tests. `python corpus.py` writes corpus.json, which Rust and Python read.

Every text has a name, so that a failing test says which one; nothing here is random. The JSON is ASCII
(escapes), so no editor or checkout can normalize a text.
"""

import json
import os

# All of these are single tokens in MiniLM's vocabulary, so a text of n of them has n + 2 tokens.
COMMON = (
    "the of and in to was he is as for on with that it his by at from her she you had an were but be this are "
    "not my they one which or have him me first all also their has up who out been when after there into new two "
    "its time would no what about said we over then other so more can if like back them only some could where"
).split()

SENTENCES = [
    ("plain", "The train to the coast leaves at seven and the first carriage is always empty."),
    ("question", "Where can I renew a library card after it has expired?"),
    ("quote", "\"Never again,\" she said; then, smiling: 'well... perhaps once more!'"),
    ("numbers", "In 2019 the 3.5 km bridge cost $1,204,999.95 (about 12% over budget)."),
    ("url", "See https://example.org/a/b?c=d&e=f#g or write to someone@example.org."),
    ("code", "fn main() { let x: Vec<u8> = vec![0; 16]; println!(\"{:?}\", x); }"),
    ("markup", "<p class=\"x\">5 &lt; 6 &amp; <b>bold</b></p>"),
    ("hyphens", "A well-known, state-of-the-art, once-in-a-lifetime mother-in-law joke."),
    ("capitals", "NASA AND THE BBC SENT MCDONALD TO LOS ANGELES"),
    ("contractions", "I can't, won't and shouldn't've; it's y'all's, isn't it?"),
    ("rare_words", "Antidisestablishmentarianism and floccinaucinihilipilification puzzle spellcheckers."),
    ("science", "Mitochondrial DNA is inherited maternally, although exceptions have been documented."),
    ("recipe", "Whisk three eggs with a pinch of salt, fold in the flour and rest the batter for an hour."),
    ("law", "The tenant shall give written notice no fewer than sixty (60) days before the end of the term."),
    ("sport", "After extra time and eleven penalties each, the goalkeepers themselves had to shoot."),
    ("medicine", "Take one tablet twice daily with food; do not exceed four tablets in twenty-four hours."),
    ("dialogue", "A: Are you coming?\nB: In a minute.\nA: You said that an hour ago."),
    ("list", "1) milk\n2) bread\n3) a new umbrella\n\t- preferably one that opens"),
]

SCRIPTS = [
    ("german", "Die Straße führt über eine schmale Brücke, größer als gedacht."),
    ("french", "L'été dernier, j'ai vu où naît le fleuve : à côté d'un vieux château."),
    ("polish", "Zażółć gęślą jaźń, powiedział źrebak do łosia."),
    ("vietnamese", "Tiếng Việt có nhiều dấu thanh khác nhau."),
    ("turkish", "İstanbul'da ılık bir sabah, IĞDIR'da kar."),
    ("greek", "Η θάλασσα ήταν ήρεμη ΚΑΙ ο ουρανός γαλάζιος, ς σ Σ."),
    ("russian", "Съешь же ещё этих мягких французских булок, да выпей чаю."),
    ("ukrainian", "Ґанок їхнього будинку прикрашали квіти."),
    ("hebrew", "שלום עולם, מה שלומך היום?"),
    ("hebrew_points", "בְּרֵאשִׁית בָּרָא אֱלֹהִים"),
    ("arabic", "السلام عليكم، كيف حالك اليوم؟"),
    ("arabic_vowels", "بِسْمِ اللَّهِ الرَّحْمَٰنِ"),
    ("persian", "می‌خواهم کتاب‌ها را بخوانم"),
    ("hindi", "नमस्ते दुनिया, आज मौसम अच्छा है।"),
    ("bengali", "আমি বাংলায় গান গাই।"),
    ("tamil", "வணக்கம் உலகம், எப்படி இருக்கிறீர்கள்?"),
    ("thai", "สวัสดีชาวโลก วันนี้อากาศดี"),
    ("georgian", "გამარჯობა მსოფლიო"),
    ("amharic", "ሰላም ልዑል"),
    ("chinese", "我喜欢在早上喝一杯热茶，然后去公园散步。"),
    ("chinese_traditional", "臺灣的夏天非常炎熱，請多喝水！"),
    ("japanese", "東京タワーは高さ333メートルです。カタカナとひらがな。"),
    ("japanese_halfwidth", "ﾊﾝｶｸｶﾀｶﾅ とＦＵＬＬＷＩＤＴＨ　ＡＢＣ１２３"),
    ("korean", "안녕하세요, 오늘 날씨가 참 좋네요."),
    ("korean_jamo", "\u1112\u1161\u11ab\u1100\u1173\u11af"),
    ("cjk_extension_b", "\U00020000\U0002a6d6 and \u3400\u4db5 \uf900"),
    ("mixed_scripts", "Привет 你好 hello नमस्ते مرحبا שלום 123"),
    ("gothic", "\U00010330\U00010331\U00010332 old letters beyond the BMP"),
]

ODD = [
    ("accents_nfc", "Caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u1e69"),
    ("accents_nfd", "Cafe\u0301 nai\u0308ve A\u030angstro\u0308m s\u0323\u0307"),
    ("accents_stacked", "Z\u0351\u036b\u0343a\u0335\u0322l\u0340\u0341g\u0345o\u0300\u0301\u0302\u0303\u0304"),
    ("accent_alone", "\u0301 \u0301a \u0308"),
    ("ligatures", "\ufb01ne \ufb02ight o\ufb03ce \u01c4 \u00df \u1e9e \u0133"),
    ("dotted_i", "\u0130 i\u0307 \u0131 I"),
    ("kelvin", "\u212a \u212b \u2126 K \u00c5 \u03a9"),
    ("emoji", "Great job \U0001f600\U0001f680 \u2764\ufe0f \u2615"),
    ("emoji_zwj", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 and \U0001f9d1\U0001f3fd\u200d\U0001f680"),
    ("emoji_flags", "\U0001f1eb\U0001f1ee\U0001f1ef\U0001f1f5 \U0001f3f4\U000e0067\U000e0062\U000e007f"),
    ("emoji_keycap", "1\ufe0f\u20e3 #\ufe0f\u20e3"),
    ("nul_inside", "before\x00after the \x00 nul"),
    ("nul_only", "\x00"),
    ("nul_at_end", "ends with nul\x00"),
    ("controls", "bell\x07 back\x08space esc\x1b[31mred\x1b[0m del\x7f \x80\x85\x9f end"),
    ("separators", "a\tb\nc\rd\x0be\x0cf\x1cg\x1dh\x1ei\x1fj\u2028k\u2029l\u0085m"),
    ("zero_width", "zero\u200bwidth non\u200cjoiner jo\u200diner word\u2060joiner \ufeffbom soft\u00adhyphen"),
    ("bidi_marks", "\u202eright to left\u202c \u2066isolate\u2069 \u200e\u200f"),
    ("unicode_spaces", "en\u2002em\u2003thin\u2009nbsp\u00a0ideo\u3000ogham\u1680math\u205fend"),
    ("replacement", "bad \ufffd char \ufffe \uffff"),
    ("private_use", "\ue000 \uf8ff \U000f0000 private"),
    ("tags_unassigned", "\u0378 \U000e0001 unassigned"),
    ("math", "\u2200x\u2208\u211d: x\u00b2 \u2265 0 \u2227 \u221a2 \u2248 1.414 \U0001d4d0\U0001d7d8"),
    ("currency", "\u20ac5 \u00a33 \u20b9100 \u00a5200 \u20bd30 \u00a2"),
    ("punctuation", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ \u2014 \u2026 \u00ab\u00bb \u3001\u3002 \u00bf\u00a1"),
    ("special_sep", "a [SEP] b"),
    ("special_cls", "[CLS] already here [SEP]"),
    ("special_glued", "x[MASK]y[PAD]z[UNK][SEP][SEP]"),
    ("special_lower", "[sep] [cls] [Sep] [ SEP ] [unused1] ##ing ##"),
    ("special_only", "[SEP]"),
    ("pad_only", "[PAD] [PAD]"),
    ("word_100", "b" * 100),
    ("word_101", "b" * 101),
    ("word_200_between", "short " + "antidis" * 30 + " tail"),
    ("word_accents_over_100", "e\u0301" * 90 + " " + "e\u0301" * 101),
    ("word_5000", "q" * 5000),
    ("white_long", "left" + " " * 3000 + "right"),
    ("white_mixed_long", "\n\t \u00a0\u3000" * 700 + "end"),
    ("white_around", "   \t padded with blanks \n\n "),
    ("removed_long", "\x01\u200b" * 3000 + "visible"),
    ("punctuation_long", "?!" * 400),
    ("cjk_long", "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0" * 120),
    ("accents_long", "e\u0301\u0300\u0302 " * 300),
    ("one_word_per_line", "\n".join(COMMON * 3)),
]


def words(count, start=0):
    return " ".join(COMMON[(start + i * i + i // 7) % len(COMMON)] for i in range(count))


def prose(count):
    """`count` words of natural sentences in a fixed, ever changing order."""
    out, i = [], 0
    while len(out) < count:
        out += SENTENCES[(i * 7 + i // 18) % 16][1].split()
        i += 1
    return " ".join(out[:count])


def texts():
    out = [("empty", ""), ("space", " "), ("spaces", " " * 40), ("newline", "\n")]
    out += [("one_letter", "a"), ("one_word", "hello"), ("one_unknown", "\u2c80"), ("two_words", "good morning")]
    out += SENTENCES + SCRIPTS + ODD
    # Token counts with [CLS] and [SEP], about every max length in the reference models.
    for tokens in (16, 17, 47, 48, 49, 63, 64, 65, 127, 128, 129, 254, 255, 256, 257, 510, 511, 512, 513):
        out.append((f"tokens_{tokens}", words(tokens - 2, tokens)))
    for count in (20, 60, 120, 200, 300, 1000, 5000):
        out.append((f"words_{count}", prose(count)))
    return [{"name": name, "text": text} for name, text in out]


QUESTIONS = [
    ("How tall is the tower?", "The tower is 333 metres tall and was finished in 1958."),
    ("How tall is the tower?", "Bread rises because yeast gives off gas."),
    ("What is the capital of Finland?", "Helsinki is the capital and largest city of Finland."),
    ("A man is playing a guitar.", "Someone is making music."),
    ("A man is playing a guitar.", "Nobody is playing any instrument."),
    ("The cat sat on the mat.", "The cat sat on the mat."),
    ("when does the library open", "Opening hours: Monday to Friday, 9:00 to 18:00."),
    ("Can I return shoes without a receipt?", "Returns need a proof of purchase; unworn shoes can be exchanged."),
    ("best way to cook rice", "Rinse it, use one and a half parts of water, and let it steam covered."),
    ("¿Dónde está la estación?", "The station is behind the old market."),
    ("天气怎么样", "今天天气很好，适合散步。"),
    ("Кто написал роман?", "Роман написал неизвестный автор."),
    ("emoji \U0001f600", "\U0001f600 reply \U0001f468\u200d\U0001f469\u200d\U0001f467"),
    ("nul\x00inside", "also\x00here"),
]


def pairs():
    out = [(f"question_{i}", a, b) for i, (a, b) in enumerate(QUESTIONS)]
    long_a, long_b = prose(600), words(600, 5)
    out += [
        ("both_empty", "", ""),
        ("first_empty", "", "only the second has words"),
        ("second_empty", "only the first has words", ""),
        ("both_space", "  ", " \n"),
        ("literal_sep", "one [SEP] two", "three [CLS] four"),
        ("unknown_word", "b" * 120, "c" * 120),
        ("first_long", long_a, "A short second text."),
        ("second_long", "A short first text.", long_b),
        ("both_long", long_a, long_b),
        ("both_long_swapped", long_b, long_a),
        ("first_long_empty", long_a, ""),
        ("empty_second_long", "", long_b),
        # Odd and even budgets for longest_first; one half just at, below and above the half of it.
        ("equal_long", words(300, 1), words(300, 2)),
        ("one_longer", words(300, 1), words(301, 2)),
        ("half_and_long", words(22, 3), words(90, 4)),
        ("long_and_half", words(90, 3), words(23, 4)),
        ("near_half", words(31, 3), words(30, 4)),
        ("half_512", words(254, 3), words(255, 4)),
        ("long_255_256", words(255, 3), words(256, 4)),
        ("fits_exactly_512", words(200, 3), words(309, 4)),
        ("one_over_512", words(200, 3), words(310, 4)),
    ]
    return [{"name": name, "text": a, "text_pair": b} for name, a, b in out]


def main():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus.json")
    with open(path + ".tmp", "w", encoding="ascii") as f:
        f.write('{"texts": [\n')
        f.write(",\n".join(json.dumps(row) for row in texts()))
        f.write('\n], "pairs": [\n')
        f.write(",\n".join(json.dumps(row) for row in pairs()))
        f.write("\n]}\n")
    os.replace(path + ".tmp", path)
    print(f"{path}: {len(texts())} texts, {len(pairs())} pairs")


if __name__ == "__main__":
    main()
