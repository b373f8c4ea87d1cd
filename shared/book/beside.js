// Opens a picture's views: one at first, a second one with another choice beside it, both of the same
// data; and asks the reader for a guess before the picture goes to its answer.

const words = {}; // the page's language, where it is not English
const say = (text, ...values) => (words[text] ?? text).replace(/#/g, () => values.shift());
const alone = () => document.querySelectorAll("[data-explorable]").length === 1; // its keys, its address
const button = (text) => make("button", { type: "button" }, say(text));

// What a view says in numbers: [element, its name and its text].
function told({ root }) {
  const named = [...root.querySelectorAll("dd")].map((each) => [each, each.previousSibling.textContent + each.textContent]);
  const beside = ".explorable-bars > span:not([class]), .explorable-legend > span";
  const bars = [...root.querySelectorAll(beside)].map((each) => {
    return [each, each.closest(".explorable-bars").firstChild.textContent + each.textContent];
  });
  return [...named, ...bars];
}

// Marks in each view the numbers that the other one does not say.
function mark(views) {
  views.forEach((one, at) => {
    const others = views.filter((_, place) => place !== at).flatMap(told);
    for (const [element, text] of told(one)) {
      const other = others.length && !others.some(([, theirs]) => theirs === text);
      element.toggleAttribute("data-other", Boolean(other));
    }
  });
}

// A number or one of some names, which the reader may give or leave; `go` shows the answer's choice.
function guess({ asks, unit, choice, is, options }, go) {
  const field = options
    ? make("select", { "aria-label": asks }, ...Object.keys(options).map((each) => make("option", {}, each)))
    : make("input", { type: "number", step: "any", min: 0, required: "", "aria-label": asks });
  const verdict = make("output");
  const look = button("show me");
  const form = make("form", { class: "explorable-guess" }, make("span", {}, asks), field);
  form.append(...(options ? [] : [unit]), make("button", {}, say("guess")), look, verdict);
  const answer = (text) => ((verdict.textContent = text), go(choice));
  const full = (each) => (options ? `${each} (${amount(options[each], unit)})` : amount(each, unit).trim());
  look.addEventListener("click", () => answer(say("It is #.", full(is))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = field.value;
    if (options) return answer(given === is ? say("Right: #.", full(is)) : say("You said #; it is #.", full(given), full(is)));
    const percent = Math.round((100 * given) / is); // as it is said: the answer is rounded too
    if (Math.abs(percent - 100) <= 5) return answer(say("Right, within 5 %: it is #.", full(is)));
    answer(say("You said #; it is #: yours is # % of it.", `${given} ${unit}`.trim(), full(is), percent));
  });
  return form;
}

function start(root) {
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  Object.values(data.states).forEach((state) => unfold(data, state));
  Object.assign(words, data.words);
  const asked = new URLSearchParams(alone() ? location.search : "");
  const names = Object.keys(data.controls);
  const valid = (values) => names.map((name, at) => (data.controls[name].includes(values[at]) ? values[at] : data.first[at]));
  const moment = (text) => (/^-?\d+$/.test(text) ? Number(text) : undefined);
  const row = make("div", { class: "explorable-views" });
  const compare = button("compare");
  const views = [];
  let written;

  const remember = () => {
    if (!alone() || location.protocol === "about:") return; // a notebook's frame has none
    clearTimeout(written); // browsers refuse many changes of the address in a row
    written = setTimeout(() => {
      const [one, other] = views;
      const step = one.moment() === undefined ? {} : { step: one.moment() };
      const beside = other ? { beside: [...Object.values(other.choice), other.moment() ?? ""].join("|") } : {};
      const address = new URLSearchParams({ ...one.choice, ...step, ...beside });
      history.replaceState(null, "", `?${address}${location.hash}`);
    }, 300);
  };
  const changed = (chosen) => (chosen && views.forEach((each) => each.draw()), mark(views), remember());
  const open = (values, step) => {
    const place = make("div", { class: "explorable-view" });
    row.append(place);
    const choice = Object.fromEntries(names.map((name, at) => [name, values[at]]));
    const twin = () => views.find((each) => each.root !== place)?.state();
    views.push(view(place, data, choice, step, twin, changed));
  };
  const beside = (values, step = views[0].moment()) => {
    if (views.length > 1) views.pop().root.remove();
    else open(values, step);
    compare.textContent = say(views.length > 1 ? "one alone" : "compare");
    views.forEach((each) => each.draw());
    mark(views);
  };
  compare.addEventListener("click", () => (beside(Object.values(views[0].choice)), remember()));
  const asks = data.guess ? [guess(data.guess, (choice) => views[0].go(choice))] : [];
  root.replaceChildren(...asks, compare, row);
  open(valid(names.map((name) => asked.get(name))), moment(asked.get("step")));
  const other = asked.get("beside")?.split("|");
  if (other) beside(valid(other), moment(other[names.length]));
}

document.querySelectorAll("[data-explorable]").forEach(start);
