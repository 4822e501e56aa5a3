// Calls the method of a client that the command line names, and prints its answer or its error as JSON.
export async function report(methodsOf) {
  const { method, request, ...place } = JSON.parse(process.argv[2]);
  try {
    console.log(JSON.stringify({ answer: await methodsOf(place)[method](request) }));
  } catch (error) {
    const { status, message } = error;
    console.log(JSON.stringify({ error: { name: error.constructor.name, status, message } }));
  }
}
