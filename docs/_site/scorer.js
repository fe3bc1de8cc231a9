// How the search of the site orders what it finds: guides before attributes, decisions and changes.
var Scorer = {
  score: ([page, , , , score, , kind]) =>
    score - (kind === "object" ? 20 : /^(api\/|decisions|changelog|contributing)/.test(page) ? 12 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
