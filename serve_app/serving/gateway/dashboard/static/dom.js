// Virtual elements, and the smallest change of the document that shows them. Unchanged elements are not
// touched, so focus, selection and scroll position survive an update, and screen readers are not disturbed.
// Text becomes a text node or an attribute only, so it cannot become markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "line", "path", "text", "title", "polyline", "defs", "pattern", "circle"]);
const KEY = Symbol("key");
const HANDLERS = Symbol("handlers");

/** Return a virtual element: `h("p", {class: "note"}, "text", h("b", null, "more"))`. `null` children are omitted. */
export function h(tag, attributes, ...children) {
  const { key, ...rest } = attributes ?? {};
  return { tag, key, attributes: rest, children: children.flat(Infinity).filter(isShown).map(asNode) };
}

/** Make `parent` contain exactly these children. */
export function show(parent, ...children) {
  reconcile(parent, children.flat(Infinity).filter(isShown).map(asNode));
}

/** Create a new element of the document. */
export function made(node) {
  const element = create(node);
  update(element, node);
  return element;
}

const isShown = (child) => child !== null && child !== undefined && child !== false;
const asNode = (child) => (typeof child === "object" ? child : String(child));

function create(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = SVG_TAGS.has(node.tag) ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
  element[KEY] = node.key;
  return element;
}

function fits(existing, node) {
  if (typeof node === "string") return existing.nodeType === Node.TEXT_NODE;
  return existing.nodeType === Node.ELEMENT_NODE && existing.localName === node.tag && existing[KEY] === node.key;
}

function update(existing, node) {
  if (typeof node === "string") {
    if (existing.data !== node) existing.data = node;
    return;
  }
  for (const { name } of [...existing.attributes]) {
    if (name !== "style" && !(name in node.attributes)) existing.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(node.attributes)) setAttribute(existing, name, value);
  reconcile(existing, node.children);
}

function setAttribute(element, name, value) {
  if (name.startsWith("on")) {
    element[HANDLERS] ??= {};
    if (element[HANDLERS][name] !== value) element[name] = element[HANDLERS][name] = value;
  } else if (name === "vars") {
    // The content security policy forbids style attributes, but allows properties set by scripts.
    for (const [property, wanted] of Object.entries(value)) {
      if (element.style.getPropertyValue(property) !== String(wanted)) element.style.setProperty(property, wanted);
    }
  } else if (value === false || value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

function reconcile(parent, nodes) {
  const keyed = new Map();
  const plain = [];
  for (const child of parent.childNodes) {
    if (child[KEY] === undefined) plain.push(child);
    else keyed.set(child[KEY], child);
  }
  let next = parent.firstChild;
  for (const node of nodes) {
    let found;
    if (node.key !== undefined) {
      found = keyed.get(node.key);
      keyed.delete(node.key);
      if (found && !fits(found, node)) { found.remove(); found = undefined; }
    } else if (plain.length && fits(plain[0], node)) {
      found = plain.shift();
    }
    found ??= create(node);
    update(found, node);
    if (found === next) next = next.nextSibling;
    else parent.insertBefore(found, next);
  }
  while (next) {
    const removed = next;
    next = next.nextSibling;
    removed.remove();
  }
}
