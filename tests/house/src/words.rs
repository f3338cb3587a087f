//! Words that are no nouns, in lower case, and nouns that look as if they were none. To add a word, add it to its list.

/// Words that make a phrase with the one word after them.
const OPENERS: &str = "\
    after as at before behind by for from in not of on per so to under until with without";
const PREPOSITIONS: &str = "\
    about above across after against along among around as at before behind below beneath beside \
    besides between beyond by down during except for from in inside into near of off on onto out \
    outside over per since than through to toward under until up upon via with within without";
const PRONOUNS: &str = "\
    all another any anything both each every everything few he it its many mine most much none \
    nothing one ones other others own same several she some something such that theirs them these \
    they this those we what which who whom whose";
/// Adverbs, conjunctions and articles.
const ADVERBS: &str = "\
    again ago ahead almost already also always an and apart aside away back but early else \
    elsewhere enough ever far here how if instead just late later maybe more never next no not now \
    often once only or perhaps please rather so soon still the then there thus together too twice \
    very when where whether while why yes yet";
/// Verbs that are no nouns, and participles without the usual endings.
const VERBS: &str = "\
    accumulate admit allow append ask become begin begun bring broken brought built choose chosen \
    come compare compute dealt decide declare describe done drawn eaten expect fallen find \
    forgotten found gave generate give given gone got grown has have hear hears heard held hidden \
    is keep keeps kept knew known laid learn led lost made make makes meant met overdue prepare \
    presume put ran reduce reduces remember rewritten said saw say says seek seen sent \
    shown sold spent spoken stolen stuck swept taken taught tell tells thought thrown told took \
    torn understood unknown unread went won worn written";
/// Adjectives without one of [`ENDINGS`]. They are fine before a noun: `RawHeader`.
const ADJECTIVES: &str = "\
    absent bad bare better big bigger closed cold dense distinct double dry equal exact extra \
    false fast faster fickle final first fit flat foreign free fresh full good great half hot idle \
    initial large larger last least left less live local long longer loose new odd old opaque open \
    plain present pure quick raw ready real recent remote right safe second short shorter single \
    slow slower small smaller special strange third tight true upper lower valid whole wide wider \
    wrong young";
/// Endings of participles and adjectives.
const ENDINGS: [&str; 8] = ["ed", "ing", "able", "ible", "ful", "less", "ous", "est"];
/// Nouns that have one of the endings above.
const NOUNS: &str = "\
    rendezvous sharing \
    assembly binding building cable clipping crossing digest doing drawing embed embedding \
    encoding family feed finding floating forest guest interest king listing manifest mapping \
    masking meaning meeting need offloading ordering packing padding pipelining quest recording \
    reply request rest ring sampling scaling scheduling seed setting sharding shred sibling speed \
    spelling spring sting string supply tally table test thing thread timing tracing training \
    variable vest warning weed wing";

fn has(list: &str, word: &str) -> bool {
    list.split_whitespace().any(|listed| listed == word)
}

/// Whether a word with another one after it makes a phrase.
pub(crate) fn is_opener(word: &str) -> bool {
    has(OPENERS, word)
}

/// Whether a word is a preposition, a pronoun or an adverb.
pub(crate) fn is_small(word: &str) -> bool {
    let listed = [PREPOSITIONS, PRONOUNS, ADVERBS].iter().any(|list| has(list, word));
    listed || (word.ends_with("ly") && !has(NOUNS, word))
}

/// Whether a word is a participle, a verb that is no noun, or an adjective.
pub(crate) fn is_verb_or_adjective(word: &str) -> bool {
    let listed = has(VERBS, word) || has(ADJECTIVES, word);
    let ends = ENDINGS.iter().any(|ending| word.ends_with(ending));
    listed || (ends && !has(NOUNS, word))
}
