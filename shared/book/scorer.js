// Which of the pages that a search finds comes first: `html_search_scorer` in conf.py.
// Who searches wants a symptom, a word or a first line more often than the lesson that has it in a
// title, too; and a picture of that name is not yet an answer. The four numbers are Sphinx's own.
var Scorer = {
  score: ([page, , anchor, , score]) => {
    const ranked = [/when_something/, /glossary/, /first_lines/, /lesson\d\d/];
    const place = ranked.findIndex((name) => name.test(page));
    const picture = page.startsWith("explore/") ? 11 : 0;
    return score - picture + (place < 0 ? 0 : 0.8 - 0.2 * place) + (anchor ? 0.1 : 0);
  },
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
